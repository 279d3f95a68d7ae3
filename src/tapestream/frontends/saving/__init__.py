"""Saving a training run and going on with it."""
