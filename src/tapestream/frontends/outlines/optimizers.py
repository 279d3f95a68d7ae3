"""Optimizers by name: which there are, what they keep for a parameter, whether `tapestream.optimizer` takes them."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.optim.small_groups import small_group
from tapestream.optim.state import OptimizerClass, StateShape, is_elementwise, probe
from tapestream.optim.trial import way_of

PACKAGES = ("torch.optim", "pytorch_optimizer", "timm.optim", "bitsandbytes.optim")
"""Where a name without a package is looked for, in this order."""

# Tensors of the parameter's shape that the torch optimizer of this name keeps, with its default options: the usual ones
# need not be tried.
_STATE_TENSORS = {
    "adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0,
    "adadelta": 2, "adamax": 2, "asgd": 1, "nadam": 2, "radam": 2, "rprop": 2,
}  # fmt: skip
_USUAL = "adamw"
_DEFAULTS: tuple[dict[str, Any], ...] = ({}, {"lr": 1e-3})
_MATRIX = torch.Size((64, 64))
"""Low-bit optimizers do not treat less than 4096 elements in their way."""
_SMALL = (37, 41, 43, 47, 53)
"""Sizes of dimensions that tell them apart in the state of a small tensor."""


@cache
def optimizer_class(name: str) -> OptimizerClass:
    """The class of this name, whatever its letters' case, or ``package.Class``. Raises InputError where there is none,
    saying what is installed."""
    package, _, own = name.rpartition(".")
    for place in (package,) if package else PACKAGES:
        found = next((cls for known, cls in _classes(place) if known.lower() == own.lower()), None)
        if found is not None:
            return found
    missing = [place.partition(".")[0] for place in PACKAGES if not _is_there(place)]
    others = f" (not installed: {', '.join(missing)})" if missing else ""
    raise InputError(
        f"optimizer {name!r} was asked for; give {', '.join(_STATE_TENSORS)}, another class of torch.optim, one of "
        f"pytorch_optimizer, timm.optim or bitsandbytes.optim{others}, or package.Class"
    )


def checked(name: str, update: str, where: str = "device") -> str:
    """The name as others here take it. Raises InputError for one that nobody knows, and where blocks would be updated
    by an optimizer that `tapestream.optimizer` refuses."""
    known = name.lower() if name.lower() in _STATE_TENSORS else name
    why = refused(known)
    if why is not None and (update, where) != ("step", "device"):
        raise InputError(
            f"optimizer {name!r} is none that ts.optimizer takes ({why}); it steps all parameters at once, so leave "
            "update='step' and where='device'"
        )
    return known


def _classes(place: str) -> Iterator[tuple[str, OptimizerClass]]:
    if _is_there(place):
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, value in vars(importlib.import_module(place)).items():
                if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
                    yield name, value


def _is_there(place: str) -> bool:
    with suppress(ModuleNotFoundError, ValueError):
        return find_spec(place.partition(".")[0]) is not None
    return False


@cache
def refused(name: str) -> str | None:
    """Why `tapestream.optimizer` refuses it, None where it takes it. One that is refused is made by the user: its state
    is outside of every budget. Raises InputError for a name that nobody knows, and for one that needs more than
    parameters and a learning rate to be made."""
    if name in _STATE_TENSORS:
        return None
    cls, said, raw = optimizer_class(name), "", ""
    for required in _DEFAULTS:
        for shapes in (((8, 6), (5,)), ((8, 6), (9, 7))):  # some take matrices alone
            try:
                options = cls(
                    [torch.nn.Parameter(torch.zeros(shape, device="cpu")) for shape in shapes], **required
                ).param_groups[0]
                plain = {key: value for key, value in options.items() if key != "params"}
                group = small_group(plain, [(shape, torch.float32) for shape in shapes])
                way_of(cls, required, [group], torch.device("cpu"))
                probe(cls, plain, required, _MATRIX, torch.float32)
            except InputError as error:
                said = said or str(error).partition("; tapestream streams")[0]
            except Exception as error:
                raw = raw or f"{type(error).__name__}: {error}"
            else:
                return None
    if not said:
        raise InputError(
            f"optimizer {name!r} cannot be made of parameters alone ({raw}), so its name does not say what it keeps; "
            "give one that keeps as much, such as sgd with nothing, adagrad with one tensor or adamw with two"
        )
    return said


@cache
def state_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateShape, bool]:
    """What the optimizer keeps of a parameter beside a master, and whether it treats each element by itself. One that
    takes no tensor of so many dimensions (Muon takes matrices) leaves it to AdamW. Raises InputError for a name that
    nobody knows."""
    if name in _STATE_TENSORS:
        return StateShape(tuple((str(k), shape, dtype) for k in range(_STATE_TENSORS[name]))), True
    if refused(name) is not None:
        return StateShape(()), True
    cls = optimizer_class(name)
    for required in _DEFAULTS:
        for seen in (_by_shapes, _by_numbers):
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = seen(cls, required, shape, dtype)
                alike = all(size == shape for _, size, _ in found.tensors)
                return found, alike and is_elementwise(cls, required, required, dtype, torch.device("cpu"))
    return state_of(_USUAL, shape, dtype)


def _by_shapes(cls: OptimizerClass, required: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> StateShape:
    """Found without numbers. Raises what the optimizer does where it needs them."""
    return probe(cls, {}, required, torch.Size(shape), dtype, numbers=False)


def _by_numbers(
    cls: OptimizerClass, required: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> StateShape:
    """Found on a small tensor, each of whose dimensions stands for one of ``shape``."""
    small = _SMALL[: len(shape)]
    found = probe(cls, {}, required, torch.Size(small), dtype)
    sizes = dict(zip(small, shape, strict=True)) | {torch.Size(small).numel(): torch.Size(shape).numel()}

    def sized(own: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes.get(one, one) for one in own)

    tensors = tuple((key, sized(own), kind) for key, own, kind in found.tensors)
    return StateShape(tensors, found.scalars, beside=tuple((sized(own), kind) for own, kind in found.beside))
