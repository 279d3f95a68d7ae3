"""What Parameter objects, and ``.grad``, show of blocks that are divided among ranks, where they are not whole."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.ir.actions import Value

Reader: TypeAlias = Callable[[Value, int], torch.Tensor]
"""Gives a whole tensor: of which value of a block, and the number of its parameter."""

_QUESTIONS = frozenset(
    ("data_ptr", "numel", "nelement", "stride", "size", "dim", "ndimension", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "get_device", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "storage_offset", "is_same_size", "__len__", "__hash__", "__set__", "__delete__", "detach_",
    "retain_grad", "is_shared", "is_pinned", "type", "is_inference")
)  # fmt: skip
_CONTENTS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))  # attributes that give numbers
_SCALING = frozenset(("mul_", "div_", "_foreach_mul_", "_foreach_div_", "zero_", "_foreach_zero_"))
_NORMS = frozenset(("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"))


class Holder(Protocol):
    """Who has the bytes of which a rank keeps its shard."""

    away: "Away"

    def keep_part(self, value: Value, tensors: Mapping[int, torch.Tensor]) -> None:
        """Keep what belongs to this rank of whole tensors, by number of their parameter."""

    def own(self, value: Value, number: int) -> torch.Tensor:
        """The elements that this rank has of a parameter, where they live."""

    def whole(self, value: Value) -> Mapping[int, torch.Tensor]:
        """Whole tensors by number; every rank must ask."""


class Away:
    """What is away of one model: its stand-ins, and who reads it."""

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self._stand_ins: dict[tuple[Value, int], torch.Tensor] = {}

    def stand_in(self, value: Value, number: int, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor that looks like the parameter and has one number, which is none."""
        known = self._stand_ins.get((value, number))
        if known is None or known.shape != parameter.shape:
            nothing = torch.zeros((), dtype=parameter.dtype, device="cpu")
            if nothing.is_floating_point():
                nothing.fill_(torch.nan)
            known = self._stand_ins[value, number] = nothing.expand(parameter.shape)
        return known

    def looks(self, value: Value, number: int) -> torch.Tensor:
        """The stand-in that was made."""
        return self._stand_ins[value, number]

    @contextmanager
    def read_by(self, reader: Reader) -> Iterator[None]:
        """Inside, what is away is read by ``reader``."""
        before, self.reader = self.reader, reader
        try:
            yield
        finally:
            self.reader = before


class AwayParameter(nn.Parameter):
    """A parameter of which this rank has a part. Its class is this one while it is not whole."""

    _tapestream_away: "_Where"

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter(divided among ranks, of shape {list(self.shape)}; read it inside ts.whole(model))"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions of shape; give the rest whole tensors, where somebody reads them, or refuse it."""
        return _called(func, args, kwargs or {})


class AwayGradient(torch.Tensor):
    """A gradient, summed over ranks, of which this rank has a part. Norms and factors work as with a whole one."""

    _tapestream_away: "_Where"

    @staticmethod
    def standing_for(parameter: torch.Tensor, holder: Holder, value: Value, number: int) -> "AwayGradient":
        """That of a parameter."""
        like = holder.away.stand_in(value, number, parameter)
        found = like.as_subclass(AwayGradient)
        found._tapestream_away = _Where(holder, value, number)
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient(divided among ranks, of shape {list(self.shape)}; read it inside ts.whole(model))"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same as of a parameter; what clipping does works without `Away.reader`."""
        return _called(func, args, kwargs or {})


class _Where:
    """``value`` of a block and the ``number`` of a parameter in it."""

    __slots__ = ("_holder", "number", "value")

    def __init__(self, holder: Holder, value: Value, number: int) -> None:
        self._holder, self.value, self.number = weakref.ref(holder), value, number

    @property
    def holder(self) -> Holder:
        found = self._holder()
        if found is None:
            raise InputError("a gradient that was divided among ranks was read, whose model is gone")
        return found


def send_away(parameter: nn.Parameter, holder: Holder, value: Value, number: int) -> torch.Tensor:
    """Let a parameter show nothing but its looks; returns what it shows."""
    here = holder.away.stand_in(value, number, parameter)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = here
    parameter._tapestream_away = _Where(holder, value, number)  # type: ignore[attr-defined]
    parameter.__class__ = AwayParameter
    return here


def bring_back(parameter: nn.Parameter) -> None:
    """It will show its bytes."""
    if isinstance(parameter, AwayParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter._tapestream_away


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in _QUESTIONS or (name == "__get__" and attribute not in _CONTENTS) or func is torch.autograd.grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    found = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, AwayParameter | AwayGradient)]
    if name == "copy_" and found[0] is args[0]:
        return _taken(args[0], args[1])
    gradients = all(isinstance(one, AwayGradient) for one in found)
    if gradients and name in _SCALING:
        return _each(func, args, kwargs, lambda where: where.holder.own(where.value, where.number), given_back=True)
    if gradients and name in _NORMS:
        return _each(func, args, kwargs, lambda where: where.holder.whole(where.value)[where.number])
    readers = [one._tapestream_away.holder.away.reader for one in found]
    if any(reader is None for reader in readers):
        raise InputError(
            f"{attribute if name == '__get__' else name}() would read a tensor of {list(found[0].shape)} that is "
            "divided among ranks, each of which has a part of it; on every rank, read it inside of ts.whole(model), "
            "or save with ts.save()"
        )
    return _read(func, name, args, kwargs)


def _taken(target: AwayParameter | AwayGradient, source: torch.Tensor) -> Any:
    """``target.copy_(source)``, as loading a state does: every rank keeps what is its own."""
    where = target._tapestream_away
    if isinstance(source, AwayParameter | AwayGradient):
        source = source.detach()  # which needs a reader
    source = torch.as_tensor(source)
    with torch.no_grad():
        whole = torch.empty(target.shape, dtype=target.dtype).copy_(source) if _differs(source, target) else source
    where.holder.keep_part(where.value, {where.number: whole})
    if isinstance(target, AwayParameter):
        increment_version(target)  # a call whose backward is to come must not recompute with it
    return target


def _differs(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (source.shape, source.dtype) != (target.shape, target.dtype)


def _each(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Callable[[_Where], torch.Tensor],
    *, given_back: bool = False,
) -> Any:  # fmt: skip
    """Run ``func`` of one tensor, or of a list of them one by one, on what ``tensor`` gives for each."""
    first, rest = args[0], args[1:]
    if not isinstance(first, list | tuple):
        result = func(tensor(first._tapestream_away), *rest, **kwargs)
        return first if given_back else result
    results = [func([tensor(one._tapestream_away)], *rest, **kwargs) for one in first]
    return None if given_back else [result[0] for result in results]


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole tensors, and keep what it has written into them."""
    wholes: list[tuple[_Where, torch.Tensor, int]] = []

    def opened(one: Any) -> Any:
        if not isinstance(one, AwayParameter | AwayGradient):
            return one
        where = one._tapestream_away
        reader = where.holder.away.reader
        assert reader is not None
        whole = reader(where.value, where.number)
        wholes.append((where, whole, whole._version))
        return whole

    args, kwargs = pytree.tree_map(opened, (args, kwargs))
    if name == "detach":
        return args[0]
    result = func(*args, **kwargs)
    for where, whole, version in wholes:
        if whole._version != version:
            where.holder.keep_part(where.value, {where.number: whole})
    return result
