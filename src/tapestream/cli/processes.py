"""The processes that torchrun has started, for commands that run in all of them."""

import os

import torch

from tapestream.errors import InputError


def group(device: str) -> tuple[int, str]:
    """How many there are, in one process group from now on, and the device of this one; all but the first say
    nothing."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        return 1, device
    if not torch.distributed.is_available():
        raise InputError("torchrun has started this, but this PyTorch has no torch.distributed; run one process")
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    if rank():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return size, device if device == "cpu" else f"{device}:{os.environ.get('LOCAL_RANK', '0')}"


def rank() -> int:
    """Of this process."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def any_of_ranks(found: bool, device: str) -> bool:
    """Whether any process has found it."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return found
    told = torch.tensor(int(found), device=device)
    distributed.all_reduce(told, distributed.ReduceOp.MAX)
    return bool(told)
