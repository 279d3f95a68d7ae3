"""The end of a recompute: what follows its last saved tensor makes an output that nobody needs, and is left out.

The graph is recorded in full, since the cotangent enters at its end; only kernels are not run. (PyTorch's own
checkpointing stops its recompute at that point.)
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_EARLIER = 4  # saved tensors: an operation has begun before what it saves is seen
_WHOLE, _SPARSE = 2**14, 2**10  # elements: up to so many are all filled, of more one in so many


class OutputNeeded(Exception):
    """What was to be left out is needed."""


class End:
    """Where the end of a stage begins: after ``saved`` saved tensors. ``begun``: after how many of them the last
    operation that saves has not begun yet, which the first recompute finds. The mode that leaves kernels out costs tens
    of microseconds an operation, so it is on from there only."""

    __slots__ = ("begun", "saved")

    def __init__(self, saved: int) -> None:
        self.saved, self.begun = saved, max(1, saved - _EARLIER)


@contextlib.contextmanager
def end_left_out(
    end: End, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], device: torch.device
) -> Iterator["LeftOut"]:
    """Inside, saved tensors go through ``pack`` and ``unpack``; after number ``end.saved`` of them no kernel runs.

    Raises OutputNeeded when another tensor is saved then, a number taken out of one, something older written, or other
    hooks of the kind are in force (nested checkpointing keeps its arguments by itself).
    """
    saved, begun = end.saved, end.begun

    def counted(tensor: torch.Tensor) -> Any:
        before = mode.before
        packed = pack(tensor)
        mode.before = before  # what packing does is not the stage's
        count = mode.count = mode.count + 1
        if count >= begun:
            if count > saved:
                raise OutputNeeded
            if count == begun:
                stack.enter_context(mode)
            mode.on = count == saved
        return packed

    mode = _NoKernels(device, counted, end)
    with contextlib.ExitStack() as stack, saved_tensors_hooks(counted, unpack):
        yield mode.left_out


class LeftOut:
    """The memory of what was left out."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def check_dropped(self) -> None:
        """Raise OutputNeeded if something holds on to any of it: a hook's closure, an attribute, a list."""
        if not all(storage.expired() for storage in self.storages):  # type: ignore[no-untyped-call]
            raise OutputNeeded


class _Look(NamedTuple):
    """A tensor without its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Look":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


_Given: TypeAlias = tuple[Any, ...]


class _NoKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While ``on``, operations give memory of the right shape and no numbers: NaN, so that a gradient in which they
    had a part would show it."""

    def __init__(self, device: torch.device, pack: Callable[[torch.Tensor], Any], end: End) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on, self.count, self._device, self._pack, self._end = False, 0, device, pack, end
        self.before = 0  # saved tensors when the latest operation ran
        self.left_out = LeftOut()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on:
            self.before = self.count
            return func(*args, **(kwargs or {}))
        self._end.begun = max(self._end.begun, self.before)
        self.before = 0
        return self._left_out(func, args, kwargs or {})

    def _left_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if "device" in kwargs or not given or any(t.device.type != self._device.type for t in given):
            return func(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is not self._pack:
            raise OutputNeeded
        kind = _kind_of(func)
        if kind.by_data:
            raise OutputNeeded
        if kind.writes:
            if _reference(args[0]) not in self.left_out.storages:
                raise OutputNeeded
            return args[0]
        if kind.views:  # they cost nothing
            return func(*args, **kwargs)
        looks = _looks(func, args, kwargs)
        if isinstance(looks, _Look):
            return self._empty(looks)
        return pytree.tree_map_only(_Look, self._empty, looks, is_leaf=_is_look)

    def _empty(self, look: _Look) -> torch.Tensor:
        made = look.empty(self._device)
        self.left_out.storages.append(_reference(made))
        number = float("nan") if look.dtype.is_floating_point or look.dtype.is_complex else 1
        elements = made.untyped_storage().nbytes() // made.element_size()
        if elements <= _WHOLE or number == 1:
            return made.fill_(number)
        made.as_strided((elements // _SPARSE,), (_SPARSE,)).fill_(number)  # a line of memory in so many: no time
        return made


class _Kind(NamedTuple):
    """``by_data``: numbers tell the shape of the result, or are it; ``writes``: into what it is given."""

    by_data: bool
    writes: bool
    views: bool


@lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    by_data = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
    return _Kind(by_data, any(alias.is_write for alias in aliases), bool(aliases))


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    """Without PyTorch's trees, which are slow, where there are none."""
    if kwargs or any(isinstance(arg, (list, tuple, dict)) for arg in args):
        return pytree.tree_leaves((args, kwargs))
    return list(args)


def _looks(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` would give, of a tree of `_Look`."""
    if not kwargs:
        given = tuple(_Look.of(arg) if isinstance(arg, torch.Tensor) else (type(arg), arg) for arg in args)
        with contextlib.suppress(TypeError):  # an argument that has no hash
            return _looks_of(func, given)
    shapes, options = pytree.tree_map_only(torch.Tensor, lambda t: _Look.of(t).empty("meta"), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, _Look.of, func(*shapes, **options))


@lru_cache(maxsize=1024)
def _looks_of(func: Any, given: _Given) -> Any:
    args = (one.empty("meta") if isinstance(one, _Look) else one[1] for one in given)
    return pytree.tree_map_only(torch.Tensor, _Look.of, func(*args))


def _is_look(one: object) -> bool:
    return isinstance(one, _Look)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
