"""`ParameterBlock`: parameters that move together, and how their values lie in one run of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tapestream.storage.layout import Layout


@dataclass(slots=True, eq=False)
class ParameterBlock:
    """Block ``index``: Parameter objects keep their identity; only what ``.data`` shows changes.

    ``state_slots``: (parameter number, name) of each tensor in ``state_layout``, the optimizer's state.
    """

    index: int
    parameters: Sequence[nn.Parameter]
    layout: Layout = field(init=False)
    strides: tuple[tuple[int, ...], ...] = field(init=False)
    state_layout: Layout | None = None
    state_slots: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        self.layout = Layout.of((tuple(p.shape), p.dtype) for p in self.parameters)
        self.strides = tuple(p.stride() if _dense(p) else _contiguous(p) for p in self.parameters)

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters takes a gradient."""
        return any(p.requires_grad for p in self.parameters)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of the parameters' shapes and strides over ``memory``; gradients lie the same way."""
        return [
            view if view.stride() == stride else view.as_strided(view.shape, stride)
            for view, stride in zip(self.layout.views(memory), self.strides, strict=True)
        ]

    def state_views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The optimizer's state tensors over ``memory``, in the order of ``state_slots``."""
        return [] if self.state_layout is None else self.state_layout.views(memory)

    def show(self, views: Sequence[torch.Tensor]) -> None:
        """Let every parameter's ``.data`` be the view of the same number."""
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view


def _dense(tensor: torch.Tensor) -> bool:
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in pairs:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))
