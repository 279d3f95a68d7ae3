"""What a model returns beside its loss (logits, mostly), which counts as long as the user holds it.

A call with new shapes is planned as if its logits were there all the time, since the user may hold them. Most training
loops have dropped them when backward begins (``loss = model(**batch).loss``, and the Trainer of Hugging Face), so
that is looked at then, and later calls of the kind are planned with that room.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tapestream.accelerator.memory import storage_nbytes
from tapestream.runner.trees import tree_leaves
from tapestream.storage.meter import MemoryMeter


@dataclass(frozen=True, slots=True)
class Turn:
    """What runs after the last block's forward and before its backward (head, loss). ``nbytes``: with all that the
    model returns held; ``results_nbytes`` less, where what is not a loss has been dropped before backward.
    ``forward_nbytes``: until the loss is there; ``kept_nbytes``: what it holds from then on."""

    nbytes: int = 0
    results_nbytes: int = 0
    forward_nbytes: int = 0
    kept_nbytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        there: MemoryMeter,
        dropped: MemoryMeter,
        back: MemoryMeter,
        *,
        besides: int,
        loss: int,
        states: int,
        seconds: float,
    ) -> "Turn":
        """From the forward, measured, what dropping the results gave, and the backward. ``besides``: bytes that are
        counted elsewhere; ``loss``: of results of which the user makes the loss, which takes their size up to three
        times (a mean of squares does), twice until it is there, and once from then on (it holds them, or what it has
        made of them); ``states``: of blocks that the graph holds."""
        climbed = there.end_nbytes - min([0, *(nbytes for _, nbytes in there.samples)])
        freed = max(0, -dropped.end_nbytes)
        held, free = (
            max(0, max(there.rise_nbytes, climbed - less + back.peak_nbytes, back.rise_nbytes) - besides) + 3 * loss
            for less in (0, freed)
        )
        until = max(0, there.rise_nbytes, climbed) + 2 * loss
        return cls(held, held - free, until, max(climbed, loss) + states, seconds)


@dataclass(slots=True)
class Returned:
    """Of calls of one kind: ``nbytes`` that the plan may take once their results are dropped, and whether all of them
    whose backward has begun had dropped these. One that holds them later takes that much more, once."""

    nbytes: int = 0
    _found: set[bool] = field(default_factory=set)

    @property
    def dropped(self) -> bool:
        """Whether there is something to gain, and no call that held it."""
        return self._found == {True}

    def watch(self, result: Any) -> "Watched":
        """Of a call that has returned ``result``."""
        return Watched(self, references(result)) if self.nbytes and False not in self._found else Watched()

    def note(self, there: int, gone: int) -> None:
        """Of ``there`` bytes of results, a backward has found ``gone`` gone when it began. A call of smaller tensors
        than those that were measured says nothing where it has dropped them."""
        if gone < there:
            self._found.add(False)
        elif gone >= self.nbytes:
            self._found.add(True)


@dataclass(slots=True)
class Watched:
    """The results of one call, not held."""

    kind: Returned | None = None
    storages: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def look(self) -> None:
        """Backward begins. The first look counts."""
        kind, self.kind = self.kind, None
        if kind is not None:
            gone = [nbytes for storage, nbytes in self.storages if storage.expired()]  # type: ignore[no-untyped-call]
            kind.note(sum(nbytes for _, nbytes in self.storages), sum(gone))


def references(result: Any) -> list[tuple[StorageWeakRef, int]]:
    """The memory of plain tensors in ``result`` that are no numbers, not held, and its bytes, as the device's allocator
    counts them. Asking others (logits that were not made yet, sparse ones) for their memory may make it, or fail."""
    plain = [t for t in tree_leaves(result) if type(t) is torch.Tensor and t.layout is torch.strided and t.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in plain}
    return [
        (StorageWeakRef(one), storage_nbytes(one))  # type: ignore[no-untyped-call]
        for one in storages.values()
    ]


def still_held(references: list[tuple[StorageWeakRef, int]]) -> list[torch.UntypedStorage]:
    """Those that somebody holds, held."""
    found = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one, _ in references)
    return [one for one in found if one is not None]
