"""From what has been seen of a model to plans within its budget."""
