"""Calls of a streamed model, one autograd node per block."""
