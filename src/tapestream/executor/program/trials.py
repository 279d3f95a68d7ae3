"""What the calls of a kind take while they run, and while backward reverses them, beside what they leave: measured."""

import contextlib
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from tapestream.executor.program.numbering import Numbering
from tapestream.executor.program.patterns import Measured, Pattern, tensors_of
from tapestream.executor.program.record import Record
from tapestream.executor.program.seams import Apply
from tapestream.executor.program.values import nbytes_of
from tapestream.executor.program.whole import Whole
from tapestream.runner.ambient import TorchGenerators
from tapestream.storage.meter import profiling, track_memory

_AT_ONCE = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear",
     "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
     "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
)  # fmt: skip


def expected(measured: Measured, tensors: Sequence[torch.Tensor], largest: int) -> int:
    """Bytes that a call will take with what it makes and saves: those of the last of its kind; of a new one the
    ``largest`` so far, or twice what it is given."""
    known = measured.taken_nbytes
    return max(largest, 2 * sum(map(nbytes_of, tensors))) if known is None else known


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
        spare: Callable[[int], bool],
    ) -> int:
        """Note in ``record`` what its last call has taken while it ran, and what its backward will; the bytes of the
        first with what it has made. ``wanted``: which of its tensors required a gradient; ``announced``: storages that
        it wrote into; ``fresh``: what it made."""
        reverse = measured.reverse_nbytes
        if reverse is None:
            into = {id(t) for t in tensors if announced and numbers.storage_of(t) in announced}
            room = spare if any(t.requires_grad for t in (*fresh, *tensors)) else None
            reverse = self._tried(record, measured, tensors, wanted, into, numbers.made_nbytes, room)
        transient = measured.transient_nbytes or 0
        record.reverse_nbytes.append(reverse)
        record.transient_nbytes.append(transient)
        measured.taken_nbytes = taken = numbers.made_nbytes + record.inner_nbytes[-1] + transient
        return taken

    def _tried(
        self,
        record: Record,
        measured: Measured,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        into: set[int],
        made: int,
        spare: Callable[[int], bool] | None,
    ) -> int:
        """Bytes that backward of the last call in ``record``, which made ``made`` bytes, takes: tried where ``spare``
        says that there is room, else as much as the call itself and all that it was given and gave. ``wanted``,
        ``into``: see `reverse`; ``spare``: None where no gradient is concerned.

        What users have written may have effects, and is not run for that.
        """
        pattern = record.patterns.all[record.calls[-1]]
        transient = measured.transient_nbytes or 0
        untried = transient + record.inner_nbytes[-1]
        if spare is None:
            return untried
        by_user = isinstance(pattern.function, (Apply, Whole)) or bool(pattern.foreign)
        room = 2 * (made + transient + sum(map(nbytes_of, tensors)))
        if by_user or profiling() or not spare(room):
            at_once = by_user or getattr(pattern.function, "__name__", "") in _AT_ONCE
            return untried + made + _given_nbytes(record, tensors, wanted, at_once=at_once)
        self.reverse(measured, pattern, tensors, wanted, into)
        if measured.reverse_nbytes is None:
            measured.reverse_nbytes = untried
        return measured.reverse_nbytes

    def reverse(
        self,
        measured: Measured,
        pattern: Pattern,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        written: set[int],
    ) -> None:
        """Make the call again by itself, and its backward. ``wanted``: which of its tensors required a gradient;
        ``written``: the ids of those that it writes into, of which it gets copies.

        What a write into a view makes of the whole gradient comes on top: the trial's copy is no view. Nothing is found
        where that fails.
        """
        seen = [t for t in tensors if id(t) in written and t._is_view() and t._base is not None]
        views = sum(t._base.nbytes for t in seen if t._base is not None)
        generators, cache = TorchGenerators.capture(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            hooks = saved_tensors_hooks(_same, _same)
            # What the user counts by a mode of theirs (FLOPs) is what the program does.
            with _disable_current_modes(), torch.enable_grad(), hooks, contextlib.suppress(RuntimeError, ValueError):
                leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
                given = [a.clone() if id(t) in written else a for a, t in zip(leaves, tensors, strict=True)]
                made = tensors_of(
                    pattern.call(iter(given)), [a for a, b in zip(given, leaves, strict=True) if a is not b]
                )
                results = list({id(t): t for t in made if t.grad_fn is not None}.values())
                asked = [leaf for leaf in leaves if leaf.requires_grad]
                cotangents = [torch.ones_like(t) for t in results]
                with track_memory(self.device) as meter:
                    torch.autograd.grad(results, asked, cotangents, retain_graph=True, allow_unused=True)
                given_back = sum(leaf.nbytes for leaf in asked)
                measured.reverse_nbytes = views + max(0, meter.peak_nbytes - given_back)
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


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
