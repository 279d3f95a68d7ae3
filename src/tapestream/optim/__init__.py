"""Optimizer steps on streamed parameters."""
