"""Bytes: what each tier holds, its peak, and which states the device holds."""

from collections.abc import Callable

from tapestream.costs import Profile
from tapestream.ir import Tier

DEVICE = Tier.DEVICE
IN_MEMORY = tuple(tier.memory for tier in Tier)  # by tier: whose bytes its copies take


class Memory:
    """Bytes held in each memory, and the most ever held, with the position and stage of that moment."""

    __slots__ = ("nbytes", "now", "peak", "peak_position", "peak_stage", "position", "samples")

    def __init__(self, outside_nbytes: int) -> None:
        self.nbytes = [outside_nbytes, *(0 for _ in Tier if _)]
        self.peak = [*self.nbytes]
        self.peak_position = [0 for _ in Tier]
        self.peak_stage: list[int | None] = [None for _ in Tier]
        self.position = 0
        self.samples: tuple[list[tuple[float, int]], ...] = ()
        self.now: Callable[[], float] = float

    def touch(self, tier: int, extra: int = 0, stage: int | None = None) -> None:
        """This moment, with ``extra`` transient bytes, counts for the peak of the memory ``tier``."""
        reached = self.nbytes[tier] + extra
        if reached > self.peak[tier]:
            self.peak[tier] = reached
            self.peak_position[tier] = self.position
            self.peak_stage[tier] = stage
        if self.samples:
            self.samples[tier].append((self.now(), reached))

    def sample(self) -> None:
        """Note what is held now, for the timeline."""
        for tier, samples in enumerate(self.samples):
            samples.append((self.now(), self.nbytes[tier]))


class States:
    """The device copies of states: each exists while somebody holds it and counts once, as do carried storages."""

    __slots__ = ("carried", "carriers", "holds", "initial", "kept", "live", "memory", "stages")

    def __init__(self, profile: Profile, memory: Memory) -> None:
        self.stages = profile.stages
        self.initial = profile.initial_nbytes
        self.carried = profile.carried
        self.carriers = [0] * len(profile.carried)
        self.memory = memory
        self.live: int | None = None
        self.kept: set[int] = set()
        self.holds: dict[int, int] = {}

    def nbytes_of(self, k: int) -> int:
        """Of the copy of state ``k``, without carried storages."""
        return self.stages[k - 1].output_nbytes if k else self.initial

    def hold(self, k: int) -> None:
        """One more holder of state ``k``."""
        holds = self.holds
        count = holds.get(k, 0)
        holds[k] = count + 1
        if count:
            return
        nbytes = self.memory.nbytes
        nbytes[DEVICE] += self.nbytes_of(k)
        for i, storage in enumerate(self.carried):
            if storage.first <= k <= storage.last:
                if not self.carriers[i]:
                    nbytes[DEVICE] += storage.nbytes
                self.carriers[i] += 1

    def release(self, k: int) -> bool:
        """One holder fewer; True when that was the last, so that the bytes are gone."""
        holds = self.holds
        count = holds[k]
        if count > 1:
            holds[k] = count - 1
            return False
        del holds[k]
        nbytes = self.memory.nbytes
        nbytes[DEVICE] -= self.nbytes_of(k)
        for i, storage in enumerate(self.carried):
            if storage.first <= k <= storage.last:
                self.carriers[i] -= 1
                if not self.carriers[i]:
                    nbytes[DEVICE] -= storage.nbytes
        return True
