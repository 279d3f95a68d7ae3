"""What is seen of a model in its first call: what its blocks are given, return and show."""
