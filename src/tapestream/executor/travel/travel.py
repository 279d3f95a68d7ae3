"""`Travel`: obeys Offload, Prefetch, Wait and Free of what belongs to stages: states and saved tensors."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapestream.errors import ScheduleError
from tapestream.executor.travel.parcel import Parcels
from tapestream.executor.travel.saved import SavedTensors
from tapestream.ir.actions import Kind, Offload, Prefetch, Tier, Value
from tapestream.ir.schedule import Schedule, distinct_nodes
from tapestream.runner.guards import Pack, Unpack, check_versions
from tapestream.runner.stage import Stage
from tapestream.runner.state import State


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that is kept, and the version counters that its tensors had then."""

    state: State
    versions: tuple[int, ...]

    @classmethod
    def of(cls, state: State) -> "Kept":
        """Keep ``state`` as it is now."""
        return cls(state, state.versions)


def moved_saved(schedule: Schedule, most: int = 100_000) -> Container[int]:
    """Stages whose saved tensors a schedule moves; all of them where it moves some and has more than ``most`` actions,
    and so is not walked."""
    kinds = {node.value.kind for node in distinct_nodes(schedule.root) if isinstance(node, (Offload, Prefetch))}
    if Kind.SAVED not in kinds:
        return frozenset()
    if schedule.size > most:
        return range(schedule.stages)
    values = [action.value for action in schedule if isinstance(action, (Offload, Prefetch))]
    return frozenset(value.index for value in values if value.kind is Kind.SAVED)


def moves_tape(schedule: Schedule) -> bool:
    """Whether a schedule sends any state or saved tensors below the device."""
    return any(isinstance(node, Offload) and node.value.kind.by_stage for node in distinct_nodes(schedule.root))


class Travel:
    """What of one live call is kept on the device or moves below it.

    ``kept`` and ``tapes`` are the engine's: what is on the device. ``parcels`` (None: this program has no tier below)
    owns what is not.
    ``moving``: stages whose saved tensors will move; they are recorded under `hooks`.
    """

    def __init__(self, parcels: Parcels | None, stages: Sequence[Stage], moving: Container[int] = frozenset()) -> None:
        self._own, self._stages, self._moving = parcels, stages, moving
        self.kept: dict[int, Kept] = {}
        self.tapes: dict[int, Any] = {}
        self._saved: dict[int, SavedTensors] = {}
        self._bare: dict[int, State] = {}  # states that move, without their tensors

    # -- around the runs of stages ----------------------------------------------------------------------------------

    def hooks(self, stage: Stage, k: int) -> tuple[Pack, Unpack] | None:
        """Saved-tensor hooks to record stage ``k`` under, None where its saved tensors never move."""
        if k not in self._moving:
            return None
        self._saved[k] = SavedTensors(stage.name)
        return self._saved[k].hooks()

    def recorded(self, k: int) -> None:
        """Stage ``k`` has been recorded; its input and output are still held."""
        if k in self._saved:
            self._saved[k].settle(self._parcels().stays)

    def consumed(self, k: int) -> None:
        """The backward of stage ``k`` is about to run: every copy of its saved tensors goes."""
        if k in self._saved:
            self._saved.pop(k).let_go()
            self._parcels().drop(Value(Kind.SAVED, k))

    def check(self, k: int, kept: Kept) -> None:
        """Raise GradientError if ``kept``, state ``k``, was written into."""
        name = self._stages[k].name if k < len(self._stages) else "the result"
        check_versions(name, kept.versions, kept.state.versions)

    def clear(self) -> None:
        """Drop everything below the device."""
        self._saved.clear()
        self._bare.clear()
        if self._own is not None:
            self._own.close()

    # -- transfers --------------------------------------------------------------------------------------------------

    def holds(self, value: Value) -> bool:
        """See `StageMover`."""
        return self._own is not None and self._own.holds(value)

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Offload, Prefetch. Raises GradientError when what leaves was written into since it was made."""
        if source is Tier.DEVICE:
            self._pack(value)
        self._parcels().start(value, source, target)

    def wait(self, value: Value, tier: Tier) -> None:
        """Wait: what comes to the device is there from now on."""
        parcels, k = self._parcels(), value.index
        parcels.wait(value, tier)
        if tier is not Tier.DEVICE:
            self._check_unchanged(value)
        elif value.kind is Kind.STATE:
            self.kept[k] = Kept.of(replace(self._bare[k], tensors=parcels.unpack(value)))
        else:
            self._saved[k].come(parcels.unpack(value))

    def free(self, value: Value, tier: Tier) -> None:
        """Free. The last copy of saved tensors takes the record of the stage with it."""
        if tier is not Tier.DEVICE:
            self._parcels().free(value, tier)
        elif value.kind is Kind.STATE:
            del self.kept[value.index]
        elif value.kind is Kind.SAVED and self.holds(value):
            self._saved[value.index].leave()
        elif value.kind is Kind.SAVED:
            self._saved.pop(value.index, None)
            del self.tapes[value.index]
        else:
            raise ScheduleError(f"the executor does not know {value}: only states and saved tensors move by stage")

    def _pack(self, value: Value) -> None:
        parcels, k = self._parcels(), value.index
        if value.kind is Kind.STATE:
            kept = self.kept[k]
            self.check(k, kept)
            parcels.pack(value, kept.state.tensors)
            self._bare[k] = replace(kept.state, tensors=())
        elif value.kind is Kind.SAVED and k in self._saved:
            saved = self._saved[k]
            parcels.pack(value, saved.tensors(), saved.stays)
        else:
            raise ScheduleError(f"the executor cannot move {value}: only states and saved tensors of recorded stages")

    def _check_unchanged(self, value: Value) -> None:
        """What was being copied from the device must be what it was when that began."""
        if value.kind is Kind.SAVED:
            self._saved[value.index].check()
        elif value.index in self.kept:
            self.check(value.index, self.kept[value.index])

    def _parcels(self) -> Parcels:
        if self._own is None:
            raise ScheduleError("the schedule moves states to a slower tier, but this program has none")
        return self._own
