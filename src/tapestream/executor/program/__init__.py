"""Any program: what is recorded of it, and how stretches of it run again."""
