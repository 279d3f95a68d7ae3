"""What the calls of a kind take while they run, and while backward reverses them, beside what they leave: measured."""

import sys
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from tapestream.executor.program.calls.patterns import Measured, Pattern, tensors_of
from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.calls.values import nbytes_of
from tapestream.executor.program.noting.numbering import Numbering
from tapestream.executor.program.record.record import Record
from tapestream.runner.ambient import TorchGenerators
from tapestream.storage.meter import profiling, track_memory, watch_memory

_AT_ONCE = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear",
     "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
     "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
)  # fmt: skip
_SIMPLE = frozenset(
    ("add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__", "__rmul__", "neg", "exp", "log", "tanh",
     "sigmoid", "relu", "leaky_relu", "gelu", "silu", "softmax", "log_softmax", "dropout", "masked_fill", "where",
     "sum", "mean", "linear", "mm", "bmm", "addmm", "layer_norm", "embedding", "cat", "stack", "clone", "contiguous",
     "to", "view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "squeeze", "unsqueeze",
     "expand", "chunk", "split", "unbind", "__get__")
)  # fmt: skip
"""Functions whose backward takes no more beside its gradients than the call was given and gave. Of others nobody knows:
that of a convolution takes three times as much, of ``matrix_exp`` four times."""
_ROOM, _ROOM_SIMPLE = 6, 2
"""Times what a call is given, makes and takes, that its trial may need: all gradients of it, and what is made on the
way, which is less than four times as much for all of torch's functions that were looked at."""


def expected(measured: Measured, tensors: Sequence[torch.Tensor], largest: int) -> int:
    """Bytes that a call will take with what it makes and saves: those of the last of its kind; of a new one the
    ``largest`` so far, or twice what it is given."""
    known = measured.taken_nbytes
    return max(largest, 2 * sum(map(nbytes_of, tensors))) if known is None else known


class Spare(Protocol):
    """Whether so many bytes may be used for a moment; ``anyway``: they will be, if need be, whatever the answer."""

    def __call__(self, nbytes: int, *, anyway: bool) -> bool: ...


class Trials:
    """Measures the first call of each kind, where nobody else measures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, measured: Measured, call: Callable[[], Any]) -> Any:
        """What ``call`` gives; what it takes while it runs is ``measured``, unless torch.compile was at work in it."""
        if profiling():
            return call()
        graphs = _graphs()
        with track_memory(self.device) as meter:
            result = call()
        if _graphs() == graphs:
            measured.transient_nbytes = max(0, meter.peak_nbytes - max(0, meter.end_nbytes))
        return result

    def note(
        self,
        record: Record,
        numbers: Numbering,
        measured: Measured,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        announced: Set[int],
        fresh: Sequence[torch.Tensor],
        spare: Spare,
    ) -> int:
        """Note in ``record`` what its last call has taken while it ran, and what its backward will; the bytes of the
        first with what it has made. ``wanted``: which of its tensors required a gradient; ``announced``: storages that
        it wrote into; ``fresh``: what it made."""
        reverse = measured.reverse_nbytes
        if reverse is None:
            into = {id(t) for t in tensors if announced and numbers.storage_of(t) in announced}
            room = spare if any(t.requires_grad for t in (*fresh, *tensors)) else None
            reverse = self._tried(record, measured, tensors, wanted, into, numbers.made_nbytes, room)
            if measured.reverse_nbytes is None and room is not None:
                record.untried.append(len(record) - 1)
        for place, nbytes in measured.behind_nbytes.items():
            number = record.arguments_of(len(record) - 1)[place]
            if number >= 0:
                record.cotangent_nbytes[number] = max(nbytes, record.cotangent_nbytes[number])
        if measured.transient_nbytes is None:
            record.untried.append(len(record) - 1)
        transient = measured.transient_nbytes or 0
        record.reverse_nbytes.append(reverse)
        record.transient_nbytes.append(transient)
        measured.taken_nbytes = taken = numbers.made_nbytes + record.inner_nbytes[-1] + transient
        record.taken_nbytes.append(taken)
        return taken

    def _tried(
        self,
        record: Record,
        measured: Measured,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        into: set[int],
        made: int,
        spare: Spare | None,
    ) -> int:
        """Bytes that backward of the last call in ``record``, which made ``made`` bytes, takes: as tried. What is not
        tried counts as much as the call itself and all that it was given and gave. ``wanted``, ``into``: see `reverse`;
        ``spare``: None where no gradient is concerned.

        Where ``spare`` finds no room, only what is `_SIMPLE` is left untried: of the rest a guess may be too low, and
        budgets that the plan exceeds would seem to do. A backward that does not fit here does not fit later either,
        so what is exceeded for a moment now is hardly ever a budget that works. What users have written may have
        effects, and is not run for that.
        """
        pattern = record.patterns.all[record.calls[-1]]
        transient = measured.transient_nbytes or 0
        untried = transient + record.inner_nbytes[-1]
        if spare is None:
            return untried
        name = getattr(pattern.function, "__name__", "")
        users = by_user(pattern.function) or bool(pattern.foreign)
        guess = untried + made + _given_nbytes(record, tensors, wanted, at_once=users or name in _AT_ONCE)
        if users or profiling():
            return guess
        simple, whole = name in _SIMPLE, made + transient + sum(map(nbytes_of, tensors))
        if not spare((_ROOM_SIMPLE if simple else _ROOM) * whole, anyway=not simple) and simple:
            return guess
        self.reverse(measured, pattern, tensors, wanted, into, gradually=record.inner_nbytes[-1] > 0)
        if measured.reverse_nbytes is None:
            measured.reverse_nbytes = guess
        return measured.reverse_nbytes

    def reverse(
        self,
        measured: Measured,
        pattern: Pattern,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        written: set[int],
        *,
        gradually: bool = False,
    ) -> None:
        """Make the call again by itself, and its backward. ``wanted``: which of its tensors required a gradient;
        ``written``: the ids of those that it writes into, of which it gets copies; ``gradually``: it saves tensors of
        its own, which may be several nodes' and go one after the other. A tensor that it is given twice is one in the
        trial too: attention projects query, key and value at once where these are the same.

        What a write into a view makes of the whole gradient comes on top: the trial's copy is no view. Nothing is found
        where that fails.
        """
        seen = [t for t in tensors if id(t) in written and t._is_view() and t._base is not None]
        views = sum(t._base.nbytes for t in seen if t._base is not None)
        generators, cache = TorchGenerators.capture(own=pattern.generators), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            hooks = saved_tensors_hooks(torch.Tensor.detach, _same)  # a result that is saved would hold itself
            watched = watch_memory(self.device)  # on the CPU, what is freed is known if it was made inside
            # What the user counts by a mode of theirs (FLOPs) is what the program does.
            quiet, differentiable, failing = (
                _disable_current_modes(),
                torch.enable_grad(),
                suppress(RuntimeError, ValueError),
            )
            with quiet, differentiable, hooks, failing, watched as watch:
                leaves = {id(t): t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)}
                given = {k: leaf.clone() if k in written else leaf for k, leaf in leaves.items()}
                made = tensors_of(
                    pattern.call(iter([given[id(t)] for t in tensors])), [given[k] for k in leaves if k in written]
                )
                results = list({id(t): t for t in made if t.grad_fn is not None}.values())
                asked = {k: leaf for k, leaf in leaves.items() if leaf.requires_grad}
                if not (results and asked):
                    measured.reverse_nbytes = 0
                    return
                cotangents, edges = [torch.ones_like(t) for t in results], list(map(get_gradient_edge, results))
                if not gradually:  # what backward does not need goes first: there may be no room for it
                    del made, results, given
                inputs, retain = tuple(asked.values()), not gradually
                with watch.measured() as meter:
                    found = torch.autograd.grad(edges, inputs, cotangents, retain_graph=retain, allow_unused=True)
                places = {id(t): place for place, t in enumerate(tensors) if id(t) in asked}
                given_back = sum(nbytes_of(asked[id(t)]) for t in tensors if id(t) in asked)
                measured.reverse_nbytes = views + max(0, meter.peak_nbytes - given_back)
                found_at = [(places[k], gradient) for k, gradient in zip(asked, found, strict=True)]
                measured.behind_nbytes = _behind(found_at, cotangents)
        finally:
            torch.set_autocast_cache_enabled(cache)
            generators.restore()


def _graphs() -> int:
    """How many torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters.get("stats", {}).get("unique_graphs", 0)


def _given_nbytes(record: Record, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], *, at_once: bool) -> int:
    """Bytes of what the last call was given, each storage once; of tensors from outside those that take a gradient,
    unless that is made ``at_once``, by one kernel."""
    found: dict[int, int] = {}
    numbers = record.arguments_of(len(record) - 1)
    for number, tensor, takes in zip(numbers, tensors, wanted, strict=True):
        if number >= 0:
            found[record.storage[number]] = record.storage_nbytes[record.storage[number]]
        elif takes and not at_once:
            found[~number - len(record.externals)] = nbytes_of(tensor)
    return sum(found.values())


def _behind(found: Iterable[tuple[int, torch.Tensor | None]], cotangents: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of memory that gradients hold on to, by their places, where that is more than they show: the real part of
    what a Fourier transform gives. Not of those that show the memory of what backward was given."""
    given = {t.untyped_storage().data_ptr() for t in cotangents if t.layout is torch.strided}
    strided = ((place, t, t.untyped_storage()) for place, t in found if t is not None and t.layout is torch.strided)
    own = ((place, t.nbytes, storage) for place, t, storage in strided if storage.data_ptr() not in given)
    return {place: storage.nbytes() for place, nbytes, storage in own if storage.nbytes() > nbytes}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
