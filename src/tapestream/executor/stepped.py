"""`SteppedGradient`: what ``.grad`` shows of a gradient that was used as soon as it arrived."""

from typing import Any

import torch

from tapestream.errors import GradientError

_HARMLESS = frozenset(
    ("zero_", "_foreach_zero_", "detach_", "requires_grad_", "__get__", "__set__", "size", "dim", "numel",
    "is_floating_point")
)  # fmt: skip
_CHANGING_NOTHING = frozenset(("zero_", "detach_", "requires_grad_", "_foreach_zero_"))


class SteppedGradient(torch.Tensor):
    """The gradient of a parameter that an update inside backward has used; it takes no bytes. What would read it
    raises GradientError."""

    @staticmethod
    def standing_for(parameter: torch.Tensor) -> "SteppedGradient":
        """A stand-in of the parameter's shape, dtype and device."""
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return nothing.expand(parameter.shape).as_subclass(SteppedGradient)

    def __repr__(self) -> str:  # type: ignore[override]
        return "SteppedGradient(used by the update within backward, and gone)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow what ``zero_grad`` does and questions of shape, refuse the rest."""
        name = getattr(func, "__name__", str(func))
        if name not in _HARMLESS:
            raise GradientError(
                f"{name} was called on the gradient of a streamed parameter, but with update='backward' each block's "
                "gradient is used as soon as it arrives and then dropped. Clipping by global norm, GradScaler and "
                "reading .grad need update='step'"
            )
        if name in _CHANGING_NOTHING:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
