"""`Fused`: consecutive stages that a plan never parts, run as one: one graph, one look at generators and buffers."""

import bisect
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tapestream.capture.buffers import Slot
from tapestream.runner.captured import InTurn
from tapestream.runner.graph import next_sequence_number
from tapestream.runner.guards import Watch
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import tensors_in
from tapestream.runner.stills import Stills
from tapestream.runner.unneeded import End


class _FusedStills(Stills):
    """Those of all parts: what one learns of them, each of them knows."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Stage]) -> None:
        self._parts = [part.stills for part in parts]
        super().__init__(tuple(dict.fromkeys(module for part in parts for module in part.modules)))

    @property
    def late(self) -> tuple[Slot, ...]:
        """See `Stills`."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(part.late for part in self._parts)))

    @late.setter
    def late(self, slots: Sequence[Slot]) -> None:
        self.expect(slots)

    @property
    def draws_host(self) -> bool:
        """See `Stills`."""
        return any(part.draws_host for part in self._parts)

    @draws_host.setter
    def draws_host(self, draws: bool) -> None:
        for part in self._parts:
            part.draws_host = part.draws_host or draws

    def expect(self, slots: Sequence[Slot]) -> None:
        """See `Stills`."""
        for part in self._parts:
            part.expect(slots)

    def learn(self, kinds: object, after: bool) -> None:
        """See `Stills`."""
        super().learn(kinds, after)
        for part in self._parts:
            part.learn(kinds, after)


class Fused(Stage):
    """The stages ``parts``, two or more, as stage ``index`` of a shorter chain."""

    __slots__ = ("_parts",)

    def __init__(self, index: int, parts: Sequence[Stage]) -> None:
        self._parts = tuple(parts)
        self.index, self.function = index, InTurn([part.function for part in parts])
        self.stills = _FusedStills(parts)
        self.modules = self._own = self.stills.modules
        self.name = f"stages {parts[0].index} to {parts[-1].index}"

    @property
    def parts(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return self._parts


def fused_traits(parts: Sequence[Traits], *, reads_input: bool) -> Traits:
    """Of stages that are run as one, the traits. ``reads_input``: backward of the first reads the state before it, so
    that this is there to record them again where leaving out the end of the last one fails."""
    first, last = parts[0], parts[-1]
    end = None
    # Where the last one saves nothing, the end begins in the part before.
    if last.end is not None and reads_input and not any(part.reads for part in parts):
        end = End(sum(part.saves for part in parts[:-1]) + last.end.saved)
    leaves = {id(leaf): leaf for part in parts for leaf in part.leaves}
    generators = {id(one): one for part in parts for one in part.generators}
    return Traits(
        mutates=first.mutates,
        dense=first.dense,
        buffers=tuple(dict.fromkeys(slot for part in parts for slot in part.buffers)),
        draws_host=any(part.draws_host for part in parts),
        generators=tuple(generators.values()),
        cells=tuple({cell.key: cell for part in parts for cell in part.cells}.values()),
        plain_forward=all(part.plain_forward for part in parts),
        leaves=tuple(leaves.values()),
        end=end,
    )


class PartBorders:
    """What stands between the ``parts`` of a stage while it is recorded as one graph: only the runner's own backward,
    while `watch` is open, may pass."""

    def __init__(self, parts: Sequence[Stage]) -> None:
        self.watch, self._parts = Watch(), parts
        self.starts = [next_sequence_number()]
        self.inputs: list[weakref.ref[torch.Tensor]] = []  # of parts; leaves as long as nobody asks for their gradients

    def stand_before(self, part: Stage, tree: Any) -> None:
        """``part`` is about to run on ``tree``."""
        tensors = tensors_in(tree)
        self.watch.stand_before(part.name, tensors)
        self.inputs += (weakref.ref(tensor) for tensor in tensors if not tensor.requires_grad)
        self.starts.append(next_sequence_number())

    def name_of(self, sequence_number: int) -> str:
        """The part that has made the node with this number."""
        return self._parts[bisect.bisect_right(self.starts, sequence_number) - 1].name
