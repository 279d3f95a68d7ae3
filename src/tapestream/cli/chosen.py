"""What options mean to PyTorch: a device that is there, a dtype, the shape of a GPT."""

import torch

from tapestream.accelerator.device import is_present
from tapestream.cli.checks import check_dtype, one_of
from tapestream.cli.targets import GPTShape
from tapestream.errors import InputError
from tapestream.models import GPTConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def chosen_device(device: str) -> str:
    """``auto`` becomes cuda where PyTorch finds a GPU. Raises InputError for a device that is not there."""
    one_of("--device", device, ("auto", "cpu", "cuda"))
    there = is_present(torch.device("cuda"))
    if device == "cuda" and not there:
        raise InputError("--device cuda was asked for, but PyTorch finds no GPU; use --device cpu")
    return device if device != "auto" else "cuda" if there else "cpu"


def chosen_dtype(dtype: str) -> torch.dtype:
    """The dtype of ``--dtype``. Raises InputError for one that is not known."""
    check_dtype(dtype)
    return _DTYPES[dtype]


def config_of(numbers: GPTShape, dtype: torch.dtype = torch.float32) -> GPTConfig:
    """The GPT of this shape."""
    return GPTConfig(numbers.layers, numbers.width, numbers.heads, numbers.vocabulary, numbers.context, dtype=dtype)
