"""`Program`: any function as one differentiable call under a budget."""
