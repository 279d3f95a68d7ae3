"""Random numbers that depend on a key alone, not on what was drawn before."""

import hashlib

import torch


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded from ``key``: equal keys give equal streams, others unrelated ones."""
    # PyTorch's CPU generator looks at the low 32 bits of a seed only, so plain sums of key parts would collide.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
