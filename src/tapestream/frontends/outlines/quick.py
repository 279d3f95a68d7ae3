"""`QuickKernels`: operations on fake tensors, in a fraction of the time where calls of one kind come again and again.

A loop over tokens in Python makes a hundred thousand of them, and `FakeTensorMode` takes a quarter of a millisecond for
each. What it makes of a call follows from shapes and numbers: of the same ones it makes the same again. Where only
numbers differ (which token is taken), it makes what the kernel for meta tensors makes, if it did so the first time.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_META = torch.device("meta")
_OTHERS = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ABSOLUTE = (torch.ops.aten.as_strided.default,)  # says where in a storage, not where in a tensor
_Maker: TypeAlias = Callable[[tuple[Any, ...]], torch.Tensor]
"""Makes the bare tensor that a call with such arguments returns."""


class QuickKernels:
    """What operations return that are given nothing but fake tensors on the CPU and numbers, and write none of them.

    ``_made``: by operation, shapes and numbers; ``_same``: by operation and shapes alone, whether kernels for meta
    tensors make the same; ``_as_new``: attributes of a new FakeTensor."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Maker | None] = {}
        self._same: dict[Hashable, bool] = {}
        self._plain: dict[Any, bool] = {}
        self._as_new: dict[FakeTensorMode, dict[str, Any]] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``func`` returns."""
        told = None if kwargs or not self._is_plain(func) else _told(func, args)
        if told is None:
            return func(*args, **kwargs)
        mode, kind, call = told
        maker = self._made.get(call)
        if maker is None and self._same.get(kind):
            maker = partial(_by_kernel, func)
        if maker is not None:
            with in_kernel_invocation_manager(mode):
                bare = maker(args)
            return self._faked(mode, bare)
        out = func(*args)
        if call not in self._made:
            self._made[call] = maker = _maker(args, out)
            if maker is not None and kind not in self._same:
                with in_kernel_invocation_manager(mode):
                    self._same[kind] = _described(out) == _described(func(*args))
        return out

    def _faked(self, mode: FakeTensorMode, bare: torch.Tensor) -> torch.Tensor:
        """What the constructor of FakeTensor makes, in a third of the time: that looks at every argument anew."""
        attributes = self._as_new.get(mode)
        if attributes is None:
            first = FakeTensor(mode, bare, _CPU)
            self._as_new[mode] = dict(vars(first))
            return first
        made = torch.Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_CPU)
        vars(made).update(attributes)
        return made

    def _is_plain(self, func: Any) -> bool:
        plain = self._plain.get(func)
        if plain is None:
            other = func in _ABSOLUTE or any(tag in func.tags for tag in _OTHERS)
            plain = self._plain[func] = not other and not func._schema.is_mutable
        return plain


def _told(func: Any, args: tuple[Any, ...]) -> tuple[FakeTensorMode, Hashable, Hashable] | None:
    """The mode that all tensors of a call belong to, the call without numbers, and with them; None where something else
    is given."""
    mode: FakeTensorMode | None = None
    kind: list[Any] = [func]
    numbers: list[Any] = []
    for arg in args:
        if type(arg) is FakeTensor:
            if arg.constant is not None or arg.fake_device != _CPU:
                return None
            mode = arg.fake_mode
            kind += (arg.shape, arg.stride(), arg.dtype)
            continue
        if isinstance(arg, (list, tuple)):
            if not all(type(one) is int for one in arg):
                return None
            arg = tuple(arg)
        elif isinstance(arg, torch.Tensor):
            return None
        kind.append(type(arg))
        numbers.append(arg)
    return None if mode is None else (mode, tuple(kind), (*kind, *numbers))


def _described(out: torch.Tensor) -> Hashable:
    return out.shape, out.stride(), out.dtype, out.storage_offset(), out.untyped_storage().nbytes()


def _maker(args: tuple[Any, ...], out: Any) -> _Maker | None:
    """What makes another like ``out``, a new tensor or one that looks at an argument anew; None where it is neither."""
    if type(out) is not FakeTensor or out.fake_device != _CPU or out.constant is not None:
        return None
    storage = out.untyped_storage()
    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == storage._cdata:
            if arg is out or arg.dtype is not out.dtype:
                return None
            return partial(_view, place, out.shape, out.stride(), int(out.storage_offset() - arg.storage_offset()))
    if storage.nbytes() != out.numel() * out.itemsize:
        return None
    return partial(_new, out.shape, out.stride(), out.dtype)


def _view(place: int, shape: torch.Size, stride: tuple[int, ...], further: int, args: tuple[Any, ...]) -> torch.Tensor:
    seen: torch.Tensor = args[place]
    return torch.as_strided(seen, shape, stride, seen.storage_offset() + further)


def _new(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, _: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)


def _by_kernel(func: Any, args: tuple[Any, ...]) -> torch.Tensor:
    made: torch.Tensor = func(*args)
    return made
