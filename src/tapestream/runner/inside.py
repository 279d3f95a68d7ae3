"""What a stage makes inside of itself and keeps for its recompute: results of attention.

No other operation of a block takes as many seconds for each byte of its result, and its result is saved for backward
anyway: only what is differentiated is kept, which compiled code and code under ``no_grad`` never is. A recompute is
given what the run before it has made, where it asks for the same operations in the same order, of arguments that look
the same. Its graph is recorded as ever.
"""

from collections import deque
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.accelerator.memory import storage_nbytes

_ATTENTION = frozenset(
    f"aten::_scaled_dot_product_{name}attention{device}"
    for name, device in (("flash_", "_for_cpu"), ("flash_", ""), ("efficient_", ""), ("cudnn_", ""))
)
Look: TypeAlias = tuple[Any, ...]


def attends(nodes: tuple[str, ...]) -> bool:
    """Whether a graph with nodes of these names has results that may be kept."""
    return any(name.startswith("ScaledDotProduct") for name in nodes)


class Otherwise(Exception):
    """A recompute has asked for other attention than the run before it."""


class _Made(NamedTuple):
    """The result of one operation: what was asked for, what came, and at which versions."""

    look: Look
    result: Any
    versions: tuple[int, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return _tensors(self.result)


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, attention that is differentiated is kept in ``found``, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: deque[_Made] = deque()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = _is_kept(func, args, kwargs)
        result = func(*args, **kwargs)
        if kept and all(type(t) is torch.Tensor for t in _tensors(result)):
            alias = pytree.tree_map_only(torch.Tensor, _alias, result)
            self.found.append(_Made(_look(func, args, kwargs), alias, tuple(t._version for t in _tensors(alias))))
        return result


class Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations are given what ``found`` has of them; each goes as it is given."""

    def __init__(self, found: deque[_Made]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._otherwise = found, False

    ignore_compile_internals = Keeping.ignore_compile_internals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        # Not raised here, where the user's code might catch it.
        self._otherwise = self._otherwise or not self._found or self._found[0].look != _look(func, args, kwargs)
        if self._otherwise:
            return func(*args, **kwargs)
        made = self._found.popleft()
        if any(t._version != version for t, version in zip(made.tensors, made.versions, strict=True)):
            return func(*args, **kwargs)  # the stage has written into it since
        return made.result

    def check(self) -> None:
        """Raise Otherwise where something else was asked for, or less: others may have been given its like."""
        if self._otherwise or self._found:
            raise Otherwise


def nbytes_of(found: deque[_Made]) -> int:
    """Bytes that what was kept takes."""
    storages = (t.untyped_storage() for made in found for t in made.tensors)
    return sum({storage.data_ptr(): storage_nbytes(storage) for storage in storages}.values())


def _is_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention without dropout whose result is saved for backward."""
    if func.name() not in _ATTENTION or not torch.is_grad_enabled():
        return False
    return _argument(func, args, kwargs, "dropout_p") == 0.0 and any(t.requires_grad for t in _tensors((args, kwargs)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


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
