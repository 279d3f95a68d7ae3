"""The ranks of a process group: what they tell each other, and sums in their order."""
