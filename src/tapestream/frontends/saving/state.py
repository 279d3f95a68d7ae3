"""The state of what is saved, without tensors that would be made for it alone."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from tapestream.optim.streamed import StreamedOptimizer


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and loaded: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Few(nn.Module):
    """A module whose ``state_dict()`` shows more tensors than it has. Given a destination of class `AsKept`, it puts
    there those that it has; ``load_state_dict()`` takes either."""

    @abstractmethod
    def shown(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """What the ``state_dict()`` of the model shows of this module, which is called ``name`` there."""


class AsKept(OrderedDict[str, Any]):
    """A destination for ``state_dict()``, see `Few`."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata = OrderedDict[str, Any]()  # as PyTorch makes it, for the versions of modules


def in_other_groups(model: nn.Module, names: Iterable[Any]) -> str:
    """Advice for an error, where the tensors ``names`` do not fit ``model`` and are of layers in groups, as its are."""
    own = {name for m in model.modules() if isinstance(m, Few) for name in (*m._parameters, *m._buffers)}
    if not any(str(name).rpartition(".")[2] in own for name in names):
        return ""
    return (
        "; layers are in groups there and here, but not in the same ones: make the model with the depth and the "
        "group_nbytes that it was saved with (its state_dict() then fits models of any group_nbytes)"
    )


def is_stateful(part: Any) -> bool:
    """Whether its state can be saved and loaded; that of a class cannot, which has the methods too."""
    return isinstance(part, Stateful) and not isinstance(part, type)


def state_of(part: Any) -> Any:
    """``part.state_dict()``, but every tensor as it is kept: a million layers in groups are a few thousand tensors, and
    what an optimizer keeps in parts is not put together. ``part`` itself where it has no such method."""
    if isinstance(part, nn.Module) and any(isinstance(module, Few) for module in part.modules()):
        return part.state_dict(destination=AsKept())
    if isinstance(part, StreamedOptimizer):
        return part.state_in_parts()
    return part.state_dict() if is_stateful(part) else part


def only_copies(part: Any) -> bool:
    """Whether no code of others has a hand in ``part.load_state_dict()`` of a module: PyTorch's and ours copy values,
    and neither keep the tensors that they are given nor write into them."""
    return not isinstance(part, nn.Module) or all(map(_is_known, part.modules()))


def _is_known(module: nn.Module) -> bool:
    methods = (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    known = all(getattr(method, "__module__", "").startswith(("torch.nn.", "tapestream.")) for method in methods)
    return known and not module._load_state_dict_pre_hooks
