"""Gradient accumulation block by block: all micro-batches pass a block before the next one comes."""
