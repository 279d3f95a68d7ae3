"""`GradScaler`: torch's, for gradients that live in RAM below a GPU; and what refuses torch's own there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tapestream.errors import InputError


class Scaled:
    """What an optimizer says to a scaler. ``reads_below``: its gradients live in memory that a scaler would read before
    its scale has arrived there."""

    _by_ours = False

    @property
    def reads_below(self) -> bool:
        """See the class."""
        return False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler.step` asks first. Raises InputError for a scaler that does not wait."""
        if self.reads_below and not self._by_ours:
            raise InputError(
                "torch.amp.GradScaler reads its scale in RAM before it has arrived there, and this model's gradients "
                "live in RAM or on a disk; use ts.GradScaler, which waits and is otherwise the same, or bfloat16, "
                "which needs no scaler. Gradients that were unscaled are wrong: call zero_grad()"
            )
        return False

    @contextlib.contextmanager
    def by_ours(self) -> Iterator[None]:
        """Inside, a `GradScaler` steps this optimizer."""
        self._by_ours = True
        try:
            yield
        finally:
            self._by_ours = False


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, which also unscales gradients that lie in RAM or on a disk.

    torch's own does not wait until its scale is copied to where gradients are, so it multiplies gradients in RAM by
    whatever is there by then; optimizers of `ts.optimizer` refuse it. This one waits, once an optimizer step. Use it
    like torch's: ``scaler.scale(loss).backward()``, ``scaler.step(optimizer)``, ``scaler.update()``, and
    ``scaler.unscale_(optimizer)`` before clipping.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See `torch.amp.GradScaler.unscale_`."""
        with _Waiting():
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `torch.amp.GradScaler.step`."""
        with optimizer.by_ours() if isinstance(optimizer, Scaled) else contextlib.nullcontext():
            return super().step(optimizer, *args, **kwargs)


class _Waiting(TorchFunctionMode):
    """Copies between devices are over when they return."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if func is torch.Tensor.to and given.get("non_blocking"):
            given = {**given, "non_blocking": False}
        return func(*args, **given)
