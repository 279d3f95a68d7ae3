"""Guards against silent errors: what crosses a stage's border unseen is refused by name."""

from typing import Any

import torch

from tapestream.errors import GradientError


class Guard(torch.autograd.Function):
    """Stands between a stage's input and the stage: makes in-place operations on the input legal, and stops a
    backward from outside.

    The runner's own backward asks for the cotangent that arrives here and goes no further.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """``tensor`` itself, as a new tensor over the same bytes; ``root`` is any tensor that requires a gradient."""
        ctx.stage = name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        """Raises GradientError: only a backward from outside comes through."""
        raise escaped(ctx.stage)


def escaped(name: str) -> GradientError:
    """A tensor made inside a stage was differentiated from outside."""
    return GradientError(
        f"backward reached the inside of {name}: a tensor made there was used outside without being returned by it. "
        "Return the tensor as part of the stage's output, or detach() it before storing it"
    )


def check_versions(name: str, seen: tuple[int, ...], now: tuple[int, ...], what: str = "a state kept for") -> None:
    """Raise GradientError when a kept tensor was changed in place since."""
    if seen != now:
        raise GradientError(
            f"{what} {name} was modified by an in-place operation after it was kept, so recomputing would use the new "
            "values; clone() the tensor before changing it"
        )
