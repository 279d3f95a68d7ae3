"""Regions for engine tests, made without a pool's policy in between."""

import torch

from tapestream.ir import Tier
from tapestream.storage import Pool, Region

CPU = torch.device("cpu")
LANES = [
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.DEVICE),
    (Tier.HOST, Tier.DISK),
    (Tier.DISK, Tier.HOST),
    (Tier.DEVICE, Tier.DISK),
    (Tier.DISK, Tier.DEVICE),
]


def make_pool(folder, device=CPU, pin=False):
    return Pool(device, folder=folder, limits={}, pin=pin)


def fill(region: Region, seed: int) -> torch.Tensor:
    """Give the region random bytes; returns them."""
    values = torch.randint(0, 255, (region.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if region.tier is Tier.DISK:
        region.file.write_from(values)
    else:
        region.memory.copy_(values)
    return values


def content(region: Region) -> torch.Tensor:
    """The bytes of the region, wherever they are."""
    if region.tier is Tier.DISK:
        values = torch.empty(region.nbytes, dtype=torch.uint8)
        region.file.read_into(values)
        return values
    return region.memory.cpu().clone()
