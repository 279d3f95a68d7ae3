"""What the interpreter may ask of a copy engine.

An engine moves bytes between regions while compute runs, obeying the rules of `Offload`, `Prefetch` and `Wait`:
whatever the engine, a region that a copy fills is neither read nor released before `wait`, and a region that a copy
reads is neither written nor released before it. Each engine enforces what it can see of this (`Flight`).
One thread at a time calls an engine, not always the same one (autograd has threads of its own).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tapestream.ir import Tier
from tapestream.storage import Region

Lane: TypeAlias = tuple[Tier, Tier]


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A copy that was started: ``nbytes`` bytes from the start of ``source`` to the start of ``target``."""

    source: Region
    target: Region
    nbytes: int
    source_generation: int
    target_generation: int

    @property
    def lane(self) -> Lane:
        """(source tier, target tier): copies of one lane begin in order of issue, and small ones may overlap."""
        return self.source.tier, self.target.tier


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """``bytes_moved`` by (source tier, target tier), ``copies`` started, ``wait_seconds`` that callers were blocked."""

    bytes_moved: Mapping[Lane, int]
    copies: int
    wait_seconds: float


class CopyEngine(Protocol):
    """Starts copies and orders them with compute."""

    @property
    def name(self) -> str:
        """The name that `make_engine` knows it by."""

    def copy(self, source: Region, target: Region, nbytes: int | None = None) -> Ticket:
        """Start copying ``nbytes`` bytes (None: all of ``source``) and return at once.

        Raises InputError when a region is too small or the engine has no lane between these tiers, GradientError
        when a copy that nobody waited for still fills ``source`` or still uses ``target``.
        """

    def wait(self, ticket: Ticket) -> None:
        """Compute issued after this sees the copy. Raises the StorageError that ended it, if one did."""

    def compute_begins(self, regions: Sequence[Region]) -> None:
        """Compute is about to read or write these. Raises GradientError when a copy into one was not waited for."""

    def compute_ended(self, regions: Sequence[Region]) -> None:
        """All compute that reads or writes these has been issued (on CUDA it may still run)."""

    def hand_over(self, regions: Sequence[Region]) -> None:
        """Block until nothing copies from or to these HOST regions any more: users read and write them from now on."""

    def on_host(self, regions: Sequence[Region]) -> Callable[[], None]:
        """What another thread calls before it reads and writes these HOST regions: it blocks until no copy from or to
        them that was issued before this is under way. Raises GradientError when a copy into one was not waited for."""

    def release(self, region: Region) -> None:
        """Say that the region's bytes are no longer needed; call just before `Pool.release`, which takes them back."""

    def abandon(self) -> None:
        """After an exception: finish or drop all that is in flight; tickets become void, the engine stays usable."""

    def close(self) -> None:
        """Abandon, then end threads. The engine cannot be used afterwards."""

    def statistics(self) -> EngineStatistics:
        """What was moved and how long callers were blocked, since the engine was made."""
