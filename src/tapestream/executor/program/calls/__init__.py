"""What the calls of a program are: functions, constants, objects, what they write into."""
