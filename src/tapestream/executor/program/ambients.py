"""What surrounds an operation of a program while it runs."""

from collections.abc import Sequence

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.record import Ambient


def ambient_now(kinds: Sequence[str], epoch: int) -> Ambient:
    """What holds now, for devices of ``kinds``. Raises InputError in inference mode."""
    if torch.is_inference_mode_enabled():
        raise InputError("Program: inference mode is entered inside the program; use torch.no_grad() instead")
    casts = tuple(
        (kind, on, torch.get_autocast_dtype(kind) if on else None)
        for kind in kinds
        for on in (torch.is_autocast_enabled(kind),)
    )
    return Ambient(torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), torch.get_default_dtype(), epoch)


def unseen_seed() -> GradientError:
    """The generator was set by a call that nobody could see."""
    return GradientError(
        "Program: torch's random generator was set inside the program in a way that cannot be seen; use "
        "torch.manual_seed() or torch.set_rng_state()"
    )


def unshown(tensor: torch.Tensor, maker: str | None) -> GradientError:
    """``tensor`` was made inside by the node ``maker``, or (None) shows memory of one that was; no call showed how."""
    if maker is None:
        return GradientError(
            f"Program: a tensor of shape {tuple(tensor.shape)} shows memory of a tensor made inside the program, and "
            "no torch call showed how; clone() it"
        )
    return GradientError(
        f"Program: a tensor of shape {tuple(tensor.shape)} was made inside the program by {maker}, which no torch call "
        "showed (a C++ extension, say); wrap that call in a torch.autograd.Function"
    )
