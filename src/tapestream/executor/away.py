"""What Parameter objects, and ``.grad``, show of blocks that are divided among ranks, where they are not whole."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError, InputError
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
_LOOKS = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor")
)  # fmt: skip
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
_NUMBER_BY_NUMBER = frozenset(
    ("mul_", "div_", "_foreach_mul_", "_foreach_div_", "zero_", "_foreach_zero_", "clamp_", "clip_", "nan_to_num_",
    "_foreach_clamp_min_", "_foreach_clamp_max_", _UNSCALES)
)  # fmt: skip
_NORMS = frozenset(("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"))


class Holder(Protocol):
    """Who has the bytes of which a rank keeps its shard."""

    away: "Away"

    def keep_part(self, value: Value, tensors: Mapping[int, torch.Tensor]) -> None:
        """Keep what belongs to this rank of whole tensors, by number of their parameter; every rank must come with the
        same."""

    def age(self, value: Value, number: int) -> int:
        """Grows when another gradient takes the place of one."""

    def part_of(self, value: Value, number: int, whole: torch.Tensor) -> torch.Tensor:
        """What belongs to this rank of a tensor of the parameter's shape."""

    def own(self, value: Value, number: int) -> torch.Tensor:
        """The elements that this rank has of a parameter, where they live."""

    def whole(self, value: Value) -> Mapping[int, torch.Tensor]:
        """Whole tensors by number; every rank must ask."""

    def any_of(self, found: torch.Tensor) -> None:
        """Let ``found`` be the largest of all ranks'; every rank must ask."""


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
            if nothing.is_floating_point() or nothing.is_complex():
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _: Any) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


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

    def stands_for(self, value: Value, number: int) -> bool:
        """Whether it is the present gradient of this parameter."""
        where = self._tapestream_away
        return (where.value, where.number) == (value, number) and where.is_present

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gradient(divided among ranks, of shape {list(self.shape)}; read it inside ts.whole(model))"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same as of a parameter; what clipping and `GradScaler` do works without `Away.reader`."""
        return _called(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _: Any) -> torch.Tensor:
        return self.detach().clone()


class _Where:
    """``value`` of a block and the ``number`` of a parameter in it."""

    __slots__ = ("_age", "_holder", "number", "value")

    def __init__(self, holder: Holder, value: Value, number: int) -> None:
        self._holder, self.value, self.number = weakref.ref(holder), value, number
        self._age = holder.age(value, number)

    @property
    def is_present(self) -> bool:
        holder = self._holder()
        return holder is not None and holder.age(self.value, self.number) == self._age

    @property
    def holder(self) -> Holder:
        found = self._holder()
        if found is None or not self.is_present:
            raise GradientError(
                "a gradient that is gone was read: it was divided among ranks, of a step before or of a model that is "
                "streamed no more; read it before zero_grad(), inside of ts.whole(model), and keep a clone()"
            )
        return found

    @property
    def reader(self) -> "Reader | None":
        """Who reads it now."""
        return self.holder.away.reader


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
    asks = name in _QUESTIONS or name in _LOOKS or (name == "__get__" and attribute not in _CONTENTS)
    if asks or func is torch.autograd.grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    found = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, AwayParameter | AwayGradient)]
    if name == "copy_" and found[0] is args[0] and found[0]._tapestream_away.reader is None:
        return _taken(args[0], args[1])
    gradients = all(isinstance(one, AwayGradient) for one in found)
    if gradients and name in _NUMBER_BY_NUMBER:
        return _each_number(func, name, args, kwargs)
    if gradients and name in _NORMS:
        return _each_norm(func, args, kwargs)
    readers = [one._tapestream_away.reader for one in found]
    if any(reader is None for reader in readers):
        raise InputError(
            f"{attribute if name == '__get__' else name}() would read a tensor of {list(found[0].shape)} that is "
            "divided among ranks, each of which has a part of it. Between calls, read it on every rank inside of "
            "ts.whole(model), save it with ts.save() and update it with ts.optimizer(); in the model's own code, call "
            "the module that has it"
        )
    return _read(func, name, args, kwargs)


def _taken(target: AwayParameter | AwayGradient, source: torch.Tensor) -> Any:
    """``target.copy_(source)``, as loading a state does: every rank keeps what is its own."""
    where = target._tapestream_away
    if isinstance(source, AwayParameter | AwayGradient):
        source = source.detach()  # which needs a reader
    if not isinstance(source, torch.Tensor):
        source = torch.as_tensor(source, device="cpu")
    if (source.shape, source.dtype) == (target.shape, target.dtype):
        whole = source
    else:
        with torch.no_grad():
            whole = torch.empty(target.shape, dtype=target.dtype, device=source.device).copy_(source)
    where.holder.keep_part(where.value, {where.number: whole})
    if isinstance(target, AwayParameter):
        increment_version(target)  # a call whose backward is to come must not recompute with it
    return target


def _each_number(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, which changes every number by itself, on what this rank has."""
    places = [one._tapestream_away for one in pytree.tree_leaves(args) if isinstance(one, AwayGradient)]

    def own(one: Any) -> Any:
        if isinstance(one, AwayGradient):
            where = one._tapestream_away
            return where.holder.own(where.value, where.number)
        if isinstance(one, torch.Tensor) and one.dim() and len(places) == 1:  # a mask, say
            where = places[0]
            return where.holder.part_of(where.value, where.number, one)
        return one

    func(*pytree.tree_map(own, args), **pytree.tree_map(own, kwargs))
    if name == _UNSCALES:  # what is no number on one rank keeps all from stepping
        places[0].holder.any_of(args[1])
    return None if name.startswith("_") else args[0]


def _each_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on a whole tensor; on one after the other where it is given a list."""

    def whole(one: Any) -> Any:
        return _opened(one, lambda where: where.holder.whole(where.value)[where.number])

    first, *rest = args
    if not isinstance(first, list | tuple):
        return func(whole(first), *rest, **kwargs)
    return [func([whole(one)], *rest, **kwargs)[0] for one in first]


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole tensors; the reader keeps what is written into them."""

    def read(where: _Where) -> torch.Tensor:
        reader = where.reader
        assert reader is not None
        return reader(where.value, where.number)

    args, kwargs = _opened((args, kwargs), read)
    return args[0] if name == "detach" else func(*args, **kwargs)


def _opened(tree: Any, tensor: Callable[[_Where], torch.Tensor]) -> Any:
    """``tree`` with what ``tensor`` gives in place of what is away."""

    def opened(one: Any) -> Any:
        return tensor(one._tapestream_away) if isinstance(one, AwayParameter | AwayGradient) else one

    return pytree.tree_map(opened, tree)
