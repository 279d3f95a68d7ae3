"""The observed call that plans are made from, repeated until it uses no parameter that a block may send home."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tapestream.costs import StageCost
from tapestream.frontends.below import NEVER_MOVE
from tapestream.frontends.module.observing.observe import Observation, StaysPut
from tapestream.frontends.module.observing.observed import Observed
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.private import copies_of, tensors_in

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


_Costs: TypeAlias = tuple[tuple[StageCost, ...], ...]


@dataclass(slots=True)
class Timings:
    """Seconds of calls that were observed before. Bytes are observed anew each time, seconds differ from moment to
    moment: taken once, they let plans within several budgets be compared."""

    known: dict[Hashable, tuple[_Costs, float]] = field(default_factory=dict)

    def first(self, observed: Observed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """``observed``, a call with these arguments, with the seconds of the first such call that took the same
        bytes."""
        costs = tuple(tuple(segment.costs) for segment in observed.segments)
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors_in([(args, kwargs)]))
        bare = tuple(tuple(map(_without_seconds, segment)) for segment in costs)
        positions = tuple(tuple(segment.positions) for segment in observed.segments)
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        key = shapes, positions, bare, autocast, torch.get_num_threads()
        costs, turn_seconds = self.known.setdefault(key, (costs, observed.turn.seconds))
        for segment, own in zip(observed.segments, costs, strict=True):
            segment.costs = list(own)
        return replace(observed, turn=replace(observed.turn, seconds=turn_seconds))


def _without_seconds(cost: StageCost) -> StageCost:
    record = None if cost.record_seconds is None else 0.0
    return replace(cost, forward_seconds=0.0, backward_seconds=0.0, record_seconds=record, inside_seconds=0.0)


def observe_call(
    handle: "Streamed", original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Observed:
    """One observed call, in which no parameter is used that a block might have sent home."""
    handle.begin_measuring()
    # What is saved between blocks does not move with the saved tensors of these.
    links = handle.recomputes_work and not handle.accumulation.parts and handle.planner in ("auto", *NEVER_MOVE)
    written = set[int]()
    while True:
        handle.store.settle()
        handle.pinned.bring()
        handle.observation = Observation(
            handle.model, handle.store, handle.blocks, handle.device, handle.progress,
            called=handle.called, passed=handle.passed, wide=handle.wide, verify=handle.verify,
            parts=written if links else None,
        )  # fmt: skip
        try:
            with checkpointing_off(), handle.homes.tables.observed():
                found = handle.observation.run(original, *copies_of((args, kwargs)))
            staying = found.used_directly
        except StaysPut as one:
            found, staying = None, frozenset((one.block,))
        finally:
            handle.observation = None
            handle.store.settle()
        again = found is not None and (found.again or not found.written <= written)
        written |= frozenset() if found is None else found.written
        if staying <= handle.pinned.blocks and found is not None and not again:
            return found if handle.timings is None else handle.timings.first(found, args, kwargs)
        handle.pinned.add(staying)
        handle.replan()
