"""`stream`: modules whose parameters, gradients, optimizer state and tape stay within a budget."""
