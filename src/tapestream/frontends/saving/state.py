"""The state of what is saved, without tensors that would be made for it alone."""

from collections import OrderedDict
from typing import Any, Protocol, runtime_checkable

from torch import nn

from tapestream.optim.streamed import StreamedOptimizer


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and loaded: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Few(nn.Module):
    """A module whose ``state_dict()`` shows more tensors than it has. Given a destination of class `AsKept`, it puts
    there those that it has; ``load_state_dict()`` takes either."""


class AsKept(OrderedDict[str, Any]):
    """A destination for ``state_dict()``, see `Few`."""


def state_of(part: Any) -> Any:
    """``part.state_dict()``, but every tensor as it is kept: a million layers in groups are a few thousand tensors, and
    what an optimizer keeps in parts is not put together. ``part`` itself where it has no such method."""
    if isinstance(part, nn.Module) and any(isinstance(module, Few) for module in part.modules()):
        return dict(part.state_dict(destination=AsKept()))
    if isinstance(part, StreamedOptimizer):
        return part.state_in_parts()
    return part.state_dict() if isinstance(part, Stateful) else part
