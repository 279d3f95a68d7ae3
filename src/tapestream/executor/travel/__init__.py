"""States and saved tensors on their way to slower tiers and back."""
