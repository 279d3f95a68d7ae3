"""What a stage makes inside of itself and keeps for its recompute: results of attention.

No other operation of a block takes as many seconds for each byte of its result, and its result is saved for backward
anyway. A recompute is given what the run before it has made, by an operation that is the same with arguments that look
the same; its graph is recorded as ever. Anything else that it asks for is computed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = frozenset(
    f"aten::_scaled_dot_product_{name}attention{device}"
    for name, device in (("flash_", "_for_cpu"), ("flash_", ""), ("efficient_", ""), ("cudnn_", ""))
)
Look: TypeAlias = tuple[Any, ...]


def attends(nodes: tuple[str, ...]) -> bool:
    """Whether a graph with nodes of these names has results that may be kept."""
    return any(name.startswith("ScaledDotProduct") for name in nodes)


class _Made(NamedTuple):
    """The result of one operation: what was asked for, what came, and at which versions."""

    look: Look
    result: Any
    versions: tuple[int, ...]


class Inside:
    """Results of one run, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[_Made] = []

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        tensors = {t.untyped_storage().data_ptr(): t.untyped_storage() for one in self._made for t in _tensors(one)}
        return sum(storage.nbytes() for storage in tensors.values())

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """``result`` of an operation has been made; it is given back."""
        if func.name() in _ATTENTION:
            tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            if _argument(func, args, kwargs, "dropout_p") == 0.0 and all(type(t) is torch.Tensor for t in tensors):
                kept = pytree.tree_map_only(torch.Tensor, _alias, result)
                versions = tuple(t._version for t in pytree.tree_leaves(kept) if isinstance(t, torch.Tensor))
                self._made.append(_Made(_look(func, args, kwargs), kept, versions))
        return result

    def read(self) -> Iterator[_Made]:
        """From the first on."""
        return iter(self._made)


def _tensors(made: _Made) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(made.result) if isinstance(t, torch.Tensor)]


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what is worth it is kept in ``found``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Inside()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.found.add(func, args, kwargs, func(*args, **kwargs))


class Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations that ``found`` has the results of are given them, as long as these come in its order."""

    def __init__(self, found: Inside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._coming, self._next = found.read(), _Made((), None, ())
        self._advance()

    ignore_compile_internals = Keeping.ignore_compile_internals

    def _advance(self) -> None:
        self._next = next(self._coming, _Made((), None, ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = self._next
        if not made.look or made.look[0] is not func or made.look != _look(func, args, kwargs):
            return func(*args, **kwargs)
        self._advance()
        if any(t._version != version for t, version in zip(_tensors(made), made.versions, strict=True)):
            return func(*args, **kwargs)  # the stage has written into it since
        return made.result


def _look(func: Any, args: Any, kwargs: Any) -> Look:
    """What tells two calls apart, but for the numbers in their tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return func, spec, *((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in leaves)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of an argument by name, its default where it is not given."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[number] if number < len(args) else kwargs.get(name, argument.default_value)
    return None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version, without the graph that the operation's result is about to get."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
