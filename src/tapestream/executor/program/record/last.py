"""`Last`: what a complete record tells of a next call that makes the same operations (see `Following`)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias
from weakref import ref

import numpy
import torch
from torch import nn

from tapestream.executor.program.calls.patterns import Pattern, is_lasting
from tapestream.executor.program.calls.templates import PLACE
from tapestream.executor.program.record.lessons import Lessons
from tapestream.executor.program.record.record import MIXED, Record
from tapestream.executor.program.record.step import PRODUCTS, Step, places_in

_MOST = 1 << 14  # operations of a record that is held for the next call
_TELLING = PRODUCTS | frozenset(
    ("embedding", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize",
     "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div", "__truediv__",
     "__rtruediv__", "true_divide", "pow", "__pow__", "__rpow__", "neg", "__neg__", "abs", "exp", "log", "sqrt",
     "rsqrt", "square", "reciprocal", "sin", "cos", "erf", "clamp", "maximum", "minimum", "lerp", "addcmul",
     "tanh", "sigmoid", "logsigmoid", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish",
     "softplus", "hardswish", "hardsigmoid", "hardtanh", "glu", "softmax", "log_softmax", "logsumexp",
     "scaled_dot_product_attention", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
     "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "dropout",
     "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
     "max_pool1d", "max_pool2d", "max_pool3d", "interpolate", "pixel_shuffle", "pad",
     "sum", "mean", "var", "std", "amax", "amin", "cumsum", "norm", "masked_fill", "tril", "triu", "gather",
     "index_select", "cat", "concat", "stack", "clone", "contiguous", "to", "type_as", "float", "double", "half",
     "bfloat16", "view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "swapaxes",
     "squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select", "chunk", "split", "unbind", "movedim", "add_")
)  # fmt: skip
"""Functions of PyTorch's whose results have shapes and strides, and that save, as the shapes and strides of what they
are given tell, and the constants; not those (of ``nonzero``, of masks as indices) that the numbers in it tell."""


Place: TypeAlias = tuple[ref[nn.Module], str, str]
"""A module, which of its dictionaries, and the name of a tensor there: nothing may refer weakly to a parameter between
two calls, which PyTorch swaps by others then only."""


@dataclass(slots=True)
class Outside:
    """An external tensor, as it was last time: see `External`; ``place``: where it, or its like, may well be again, if
    that has been ``sought``."""

    looks: int
    storage: int
    first_use: int
    last_use: int
    place: "Place | None" = None
    sought: bool = False


@dataclass(frozen=True, slots=True)
class Last:
    """``record``: without its tensors and what it knows of them, of which is left how those ``outside`` looked.
    ``steps``: by operation, None for one that must be looked at, and at the end. ``storages``: by storage, the
    operation at which it was first seen; ``saved_nbytes``: before each operation, what those before it have saved;
    ``written``: those of others, of which its steps say that they write into them; ``lessons`` of replays."""

    record: Record
    steps: list[Step | None]
    outside: list[Outside]
    storages: list[int]
    saved_nbytes: list[int]
    written: frozenset[int]
    lessons: Lessons = field(default_factory=Lessons)

    def values_before(self, k: int) -> int:
        """How many values the operations before ``k`` have made."""
        return bisect_left(self.record.birth, k)

    def storages_before(self, k: int) -> int:
        """How many storages have been seen before operation ``k``."""
        return bisect_left(self.storages, k)


def last_of(record: Record) -> Last | None:
    """None where a call can hardly follow: of users' modes, which differ from call to call, say."""
    if not 0 < len(record) <= _MOST or record.spoilt or record.switched or record.departed:
        return None
    if any(ambient.modes or ambient.dispatching for ambient in record.ambients):
        return None
    storages = _storages(record)
    if any(after < before for before, after in pairwise(storages)):
        return None
    outside = [Outside(one.looks, one.storage, one.first_use, one.last_use) for one in record.externals]
    steps = _steps(record)
    written = frozenset(storage for step in steps if step is not None for storage in step.writes)
    return Last(_bare(record), [*steps, None], outside, storages, _saved_nbytes(record), written)


def _bare(record: Record) -> Record:
    """``record`` without external tensors, and what else may be large, or somebody's."""
    bare = Record(record.kinds)
    for name in (*BY_OPERATION, *_OTHERS):
        setattr(bare, name, getattr(record, name))
    bare.ambients = record.ambients
    return bare


BY_OPERATION = (
    "ambient", "seconds", "save_ends", "packs", "given", "looks", "inner_nbytes", "transient_nbytes", "reverse_nbytes",
    "taken_nbytes", "outcomes", "argument_ends", "result_ends",
)  # fmt: skip
"""What a record knows by operation, in arrays."""
_OTHERS = (
    "calls", "arguments", "results", "saves", "birth", "last_use", "death", "cotangent_nbytes", "storage",
    "storage_nbytes", "storage_external",
)  # fmt: skip


def _steps(record: Record) -> list[Step | None]:
    tells = [_tells(pattern) for pattern in record.patterns.all]
    odd = {*record.drawn, *record.hidden, *record.needs, *record.untried}
    written: dict[int, list[int]] = {}
    for storage, operations in record.writes.items():
        for k in operations:
            written.setdefault(k, []).append(storage)
    return [
        _step(record, k, written.get(k, [])) if tells[call] and k not in odd else None
        for k, call in enumerate(record.calls)
    ]


def _step(record: Record, k: int, writes: Sequence[int]) -> Step | None:
    pattern, results, arguments = record.pattern(k), record.results_of(k), record.arguments_of(k)
    new = sum(number >= 0 and record.birth[number] == k for number in results)
    gives_back = len(results) == 1 and len(arguments) > 0 and results[0] == arguments[0] and bool(writes)
    if record.given[k] == MIXED or not results or not (new == len(results) or gives_back):
        return None
    if not all(record.storage_external[storage] for storage in writes):
        return None  # restart checkpoints may hold it
    if not all(record.storage_nbytes[record.storage_of(number)] for number in (*arguments, *results)):
        return None  # of a sparse tensor, the numbers in it tell how much there is
    return Step(pattern, tuple(arguments), record.packs[k], new, record.ambient[k], tuple(sorted(writes)))


def _tells(pattern: Pattern) -> bool:
    """Whether equal calls of it on like tensors give, save and write the like."""
    function = pattern.function
    if function is torch.Tensor.__getitem__:  # of a mask, the numbers in it tell
        return not pattern.foreign and pattern.args[0] is PLACE and not places_in(pattern.args[1:])
    return not pattern.foreign and is_lasting(function) and getattr(function, "__name__", "") in _TELLING


def _storages(record: Record) -> list[int]:
    seen = numpy.full(len(record.storage_nbytes), len(record))
    numpy.minimum.at(seen, numpy.asarray(record.storage, dtype=numpy.int64), numpy.asarray(record.birth))
    for external in record.externals:
        seen[external.storage] = min(seen[external.storage], external.first_use)
    found: list[int] = seen.tolist()
    return found


def _saved_nbytes(record: Record) -> list[int]:
    storages = numpy.asarray(record.saves, dtype=numpy.int64)
    nbytes = numpy.zeros(len(storages), dtype=numpy.int64)
    first = numpy.unique(storages, return_index=True)[1]
    nbytes[first] = numpy.asarray(record.storage_nbytes)[storages[first]]
    ends = numpy.asarray(record.save_ends).astype(numpy.int64)
    by_end = numpy.concatenate(([0], numpy.cumsum(nbytes)))[ends] + numpy.cumsum(record.inner_nbytes)
    found: list[int] = [0, *by_end.tolist()]
    return found
