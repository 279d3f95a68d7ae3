"""The end of a recompute: what follows its last saved tensor makes an output that nobody needs, and is left out.

The graph is recorded in full, since the cotangent enters at its end; only kernels are not run. (PyTorch's own
checkpointing stops its recompute at that point.)
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.runner.guards import check_asked

_EARLIER = 4  # saved tensors: an operation has begun before what it saves is seen


class OutputNeeded(Exception):
    """What was to be left out is needed."""


class End:
    """Where the end of a stage begins: after ``saved`` saved tensors. ``begun``: after how many of them the last
    operation that saves has not begun yet, which the first recompute finds. The mode that leaves kernels out costs tens
    of microseconds an operation, so it is on from there only. ``failed``: it could not be left out once, and is not
    from then on."""

    __slots__ = ("begun", "failed", "saved")

    def __init__(self, saved: int) -> None:
        self.saved, self.begun, self.failed = saved, max(1, saved - _EARLIER), False


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
        stack.callback(mode.shared.clear)  # the graph keeps the mode
        yield mode.left_out


class LeftOut:
    """The memory of what was left out."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def check_dropped(self) -> None:
        """Raise OutputNeeded if something holds on to any of it: a hook's closure, an attribute, a list."""
        if not all(storage.expired() for storage in self.storages):  # type: ignore[no-untyped-call]
            raise OutputNeeded


class Reading(TorchFunctionMode):
    """Inside, ``found`` tells whether anything asks for a tensor's numbers, or where they lie, other than by an
    operation: what that gives of what was left out, `end_left_out` does not see. ``inputs``: of the stage ``name``,
    which may not ask everything of them (see `check_asked`)."""

    only_watches = True

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.found, self._name, self._inputs = False, name, frozenset(map(id, inputs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_asked(func, args, self._inputs, self._name)
        self.found = self.found or func in _READING
        return func(*args, **(kwargs or {}))


_READING = frozenset(
    (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__dlpack__)
)


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

    @property
    def reach(self) -> int:
        """Numbers from the first one to the last."""
        spread = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return 1 + spread if self.shape.numel() else 0


class _NoKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While ``on``, operations give memory of the right shape and no numbers: NaN, so that a gradient in which they
    had a part would show it. All of a dtype share it: nothing is written there."""

    def __init__(self, device: torch.device, pack: Callable[[torch.Tensor], Any], end: End) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on, self.count, self._device, self._pack, self._end = False, 0, device, pack, end
        self.before = 0  # saved tensors when the latest operation ran
        self.left_out = LeftOut()
        self.shared: dict[torch.dtype, torch.Tensor] = {}

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
            if any(_reference(t) in self.left_out.storages for t in given):
                raise OutputNeeded
            return func(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is not self._pack:
            raise OutputNeeded
        kind = _kind_of(func)
        if kind.by_data or kind.writes_elsewhere:
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
        made = self.shared.get(look.dtype)
        if made is None or len(made) < look.reach:
            number = float("nan") if look.dtype.is_floating_point or look.dtype.is_complex else 1
            made = torch.full((look.reach,), number, dtype=look.dtype, device=self._device)
            self.left_out.storages.append(_reference(made))
            self.shared[look.dtype] = made
        return made.as_strided(look.shape, look.stride)


class _Kind(NamedTuple):
    """``by_data``: numbers tell the shape of the result, or are it; ``writes``: into the first of its arguments, which
    it gives back; ``writes_elsewhere``: into others."""

    by_data: bool
    writes: bool
    writes_elsewhere: bool
    views: bool


@lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    taken, given = func._schema.arguments, func._schema.returns
    written = [k for k, one in enumerate(taken) if one.alias_info is not None and one.alias_info.is_write]
    by_data = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
    first = written == [0] and len(given) == 1 and str(taken[0].type) == "Tensor"
    views = any(one.alias_info is not None for one in given)
    return _Kind(by_data, first, bool(written) and not first, views)


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
            return _looks_of(func, given, torch.get_default_dtype())
    shapes, options = pytree.tree_map_only(torch.Tensor, lambda t: _Look.of(t).empty("meta"), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, _Look.of, func(*shapes, **options))


@lru_cache(maxsize=1024)
def _looks_of(func: Any, given: tuple[Any, ...], default: torch.dtype) -> Any:
    args = (one.empty("meta") if isinstance(one, _Look) else one[1] for one in given)
    return pytree.tree_map_only(torch.Tensor, _Look.of, func(*args))


def _is_look(one: object) -> bool:
    return isinstance(one, _Look)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
