"""`Simulation`: what the judge found."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tapestream.ir import PhaseKind, Tier, Timeline


@dataclass(frozen=True, slots=True)
class Simulation:
    """What running a valid schedule once will take.

    ``peak_nbytes``: most bytes ever held in each tier, transient ones and ``Profile.outside_nbytes`` included.
    ``peak_position``: the first action (its index in the flat schedule) at which that is reached. ``makespan_seconds``
    = ``compute_seconds`` + ``stall_seconds``. ``phase_seconds`` splits it by the user's calls; the turn (head and loss)
    is counted in the backward phase. ``forwards``: evaluations of stages, recorded ones included. ``recorded``,
    ``backwards``: numbers of stages. ``bytes_moved`` by (source, target): only copies that happened. ``updated``: by
    tier, parameter blocks of which something was updated there.
    """

    peak_nbytes: dict[Tier, int]
    peak_position: dict[Tier, int]
    makespan_seconds: float
    compute_seconds: float
    stall_seconds: float
    forwards: int
    recorded: int
    backwards: int
    phase_seconds: dict[PhaseKind, float]
    bytes_moved: dict[tuple[Tier, Tier], int]
    updated: dict[Tier, frozenset[int]]
    _trace: Callable[[], Timeline] = field(repr=False, compare=False)

    @property
    def timeline(self) -> Timeline:
        """Who was busy when, and how many bytes were held. Computed anew on each use, since planning rarely needs it.

        Raises InputError for schedules of more than a million actions.
        """
        return self._trace()
