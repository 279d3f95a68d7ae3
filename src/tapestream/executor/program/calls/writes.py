"""What a call is about to write into, and calls that a program may not make."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn import functional

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.calls.values import is_parameter
from tapestream.executor.program.calls.whole import Whole, announced

_AVERAGES = ("running_mean", "running_var")
_IN_PYTHON: dict[Any, tuple[int, int]] = {functional.batch_norm: (1, 2), functional.instance_norm: (1, 2)}
_AVERAGING = frozenset(
    ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm",
     "_batch_norm_impl_index", "batch_norm_update_stats", "batch_norm_gather_stats",
     "batch_norm_gather_stats_with_counts", "_native_batch_norm_legit", "_batch_norm_with_update")
)  # fmt: skip
"""Operations that write running statistics, of which most schemas do not say so and no version tells."""
_OPERATIONS = (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_FLAGS = (5, "training", "use_input_stats")  # a place, or a name

_ASKED = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_sparse", "itemsize")
QUESTIONS = frozenset(
    (*(getattr(torch.Tensor, name).__get__ for name in _ASKED if hasattr(torch.Tensor, name)),
     torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_contiguous,
     torch.Tensor.storage_offset, torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
     torch.is_floating_point, torch.is_complex, torch.numel)
)  # fmt: skip
"""Calls that make no tensor, write into none and draw nothing: they need not be noted."""
_DROPOUT = functional.dropout
_NOTHING = torch.empty(1, device="cpu")
_GIVES_BACK = _DROPOUT(_NOTHING, 0.0, True) is _NOTHING and _DROPOUT(_NOTHING, 0.5, False) is _NOTHING


def gives_back(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is one of dropout that drops nothing: it gives what it is given, and draws nothing."""
    if function is not _DROPOUT or not (_GIVES_BACK and kwargs and len(args) == 1 and type(args[0]) is torch.Tensor):
        return False
    return (kwargs.get("p") == 0 or kwargs.get("training") is False) and kwargs.get("inplace") is False


SWITCHES = frozenset((torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__))  # type: ignore[attr-defined]
"""Calls that say whether a tensor needs a gradient from here on."""
SETS_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""The call that gives a tensor the memory of another."""
_INSIDE = frozenset(("backward", "grad"))
_STORAGE = frozenset(("set_", "resize_", "resize_as_", "set_data", "share_memory_", "swap_tensors"))


def written(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call says it will write into: by its name, ``out=``, ``inplace=True``, its schema, or running
    statistics.

    A call may write into others unannounced (only their versions tell), and need not write into these.
    """
    if isinstance(function, Whole):
        return announced(args)
    name = getattr(function, "__name__", "").partition(".")[0]  # of torch.ops, the packet's
    found: list[Any] = []
    if name == "__set__" or name == "__setitem__" or name.startswith("__i") or _in_place(name):
        found.append(args[0] if args else next(iter(kwargs.values()), None))  # torch.nn.init names all
    found += statistics(function, args, kwargs)
    if isinstance(function, _OPERATIONS):
        found += [args[at] if at < len(args) else kwargs.get(label) for at, label in _said_by_schema(function)]
    if kwargs:
        found.append(kwargs.get("out"))
    place = _place_of_inplace(function)
    if _says_so(kwargs.get("inplace")) or (place is not None and place < len(args) and _says_so(args[place])):
        found.append(args[0] if args else kwargs.get("input"))
    tensors: list[torch.Tensor] = []
    for item in found:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, (tuple, list)):
            tensors += [t for t in item if isinstance(t, torch.Tensor)]
    return tensors


def _says_so(flag: Any) -> bool:
    return isinstance(flag, torch.Tensor) or bool(flag)  # what a tensor says may be another thing the next time


def statistics(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The running statistics that a call may write into without a new version."""
    places = places_of_statistics(function)
    if places is None or trains(args, kwargs) is False:
        return []
    found = [*(args[place] for place in places if place < len(args)), *(kwargs.get(name) for name in _AVERAGES)]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def places_of_statistics(function: Callable[..., Any]) -> tuple[int, int] | None:
    """Which arguments are running statistics that the function may write into, None where it has none."""
    if isinstance(function, _OPERATIONS):
        return _averaged(function)
    return _IN_PYTHON.get(function) if isinstance(function, types.FunctionType) else None


@functools.lru_cache(1024)
def _averaged(function: Any) -> tuple[int, int] | None:
    for schema in _schemas(function):
        names = [argument.name for argument in schema.arguments]
        if schema.name.partition("::")[2] in _AVERAGING and set(_AVERAGES).issubset(names):
            return names.index(_AVERAGES[0]), names.index(_AVERAGES[1])
    return None


@functools.lru_cache(1024)
def _said_by_schema(function: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the tensors that an operation's schema says are written into."""
    return tuple({
        (place, argument.name): None
        for schema in _schemas(function)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write and not argument.is_out
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    })  # fmt: skip


def _schemas(function: Any) -> list[Any]:
    if isinstance(function, torch._ops.OpOverload):
        return [function._schema]
    packet = function
    if isinstance(function, types.BuiltinFunctionType):
        packet = getattr(torch.ops.aten, function.__name__, None)
    return [] if packet is None else [getattr(packet, name)._schema for name in packet.overloads()]


def trains(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """What a function with running statistics is told: True to normalise by its input and to write, False to read,
    None: nothing."""
    found = [value for place, value in (*enumerate(args), *(kwargs or {}).items()) if place in _FLAGS]
    return found[0] if found else None


def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Which argument of a Python function is ``inplace``."""
    code = getattr(function, "__code__", None)
    return None if code is None else _place_in(code)


@functools.lru_cache(1024)
def _place_in(code: types.CodeType) -> int | None:
    names = code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else None


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "retain_grad_")


def check_changed(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    before: Sequence[tuple[int, bool]],
    storage_of: Callable[[torch.Tensor], int],
    external: Sequence[int],
    announced: Set[int],
    *,
    own: bool,
    values: Sequence[bool] = (),
) -> set[int]:
    """Refuse writes into tensors of others that a replay could not honour; gives storages written unannounced, which
    spoils the restart checkpoints that hold them. ``before``: version and need of a gradient; ``external``: by storage;
    ``own``: such tensors may be the program's, from before it was noted; ``values``: which of them it has made.
    """
    spoilt = set()
    for place, (tensor, (version, wanted)) in enumerate(zip(tensors, before, strict=True)):
        written, flag, storage = tensor._version != version, tensor.requires_grad != wanted, storage_of(tensor)
        if not (written or flag):
            continue
        if own and storage in announced and not (wanted and is_parameter(tensor)):
            continue
        if written and not flag and wanted and is_parameter(tensor) and storage in announced:
            continue  # under no_grad, as when a layer is initialised by its first batch: replays use copies
        if flag and not written and values and values[place]:
            continue  # a leaf of the program's own over memory of others (``x.detach().requires_grad_()``)
        if external[storage] and flag:
            raise GradientError(
                f"Program: requires_grad of a tensor of shape {tuple(tensor.shape)} that the program did not make was "
                "switched inside; switch it before the program and after backward, or call the module with detached "
                "parameters (torch.func.functional_call)"
            )
        if external[storage] and (wanted or tensor.requires_grad):
            raise GradientError(
                f"Program: {_name(function)} changed in place a tensor of shape {tuple(tensor.shape)} that the program "
                "did not make and that requires a gradient; clone() it inside the program first"
            )
        if written and storage not in announced:
            if external[storage]:
                raise GradientError(
                    f"Program: {_name(function)} wrote into a tensor of shape {tuple(tensor.shape)} that the program "
                    "did not make, without declaring it; clone() it inside the program"
                )
            spoilt.add(storage)
    return spoilt


def _name(function: Callable[..., Any]) -> str:
    name: str | None = getattr(function, "__name__", None)
    return name or str(function)  # of a module, a page of text: asked for in errors only


def check_allowed(function: Callable[..., Any]) -> None:
    """Raise GradientError or InputError, by name, for what a replay could not honour."""
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    if name in _INSIDE and (module == "torch.autograd" or name == "backward"):
        raise GradientError(
            f"Program: the program calls {name} itself, but its saved tensors are dropped while it runs; take that "
            "part out of the program, or write it as a torch.autograd.Function"
        )
    if name in _STORAGE:
        raise InputError(
            f"Program: {name} changes the memory behind a tensor, which cannot be replayed; use copy_() instead"
        )
    if name == "__set__":
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        if attribute in ("data", "grad"):
            used = " that it has made or that backward needs" if attribute == "data" else ""
            raise InputError(
                f"Program: the program sets .{attribute} of a tensor{used}, which cannot be replayed; use copy_() "
                "under torch.no_grad() instead"
            )
