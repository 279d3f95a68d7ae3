"""`Accumulation`: in which order the micro-batches of a streamed model pass its blocks, and why."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.draws import Draws
from tapestream.units import format_seconds

_TRIES = 2  # a first call may make what later ones find (a cached mask)
_MOST_KINDS = 64


@dataclass(slots=True)
class Kind:
    """Micro-batches of one kind: so many, of these shapes. ``found``: the plans of those shapes; ``together``: for all
    micro-batches, None where these do not fit or are no faster; ``why``: they go one after the other; ``failed``: how
    often they could not go together; ``apart_nbytes``: of gradients that are made for each of them apart, which
    ``together`` counts; ``seconds``: planned, together and one by one."""

    found: Sequence[Prepared]
    count: int
    together: Prepared | None = None
    why: str | None = None
    failed: int = 0
    apart_nbytes: int = 0
    seconds: tuple[float, float] | None = None

    @property
    def joint(self) -> Prepared | None:
        """The plans of all together, where they are to be used."""
        return self.together if self.failed < _TRIES else None

    def fail(self, why: str) -> None:
        """They could not go together."""
        self.failed, self.why = self.failed + 1, why

    def give_up(self, why: str) -> None:
        """They never can."""
        self.together, self.why = None, why


@dataclass(slots=True)
class Accumulation:
    """Of one model. ``kinds``: by ids of plans, and how many micro-batches; ``draws``: what a forward draws, by its
    shapes, None where that is not the same each time; ``said``: of the last micro-batches, None where there were
    none; ``parts``: calls are planned now whose chains end where work comes between blocks."""

    kinds: dict[object, Kind] = field(default_factory=dict)
    draws: dict[object, Draws | None] = field(default_factory=dict)
    said: str | None = None
    parts: bool = False

    @contextlib.contextmanager
    def parting(self) -> Iterator[None]:
        """Plans that are made inside are for micro-batches together: between blocks each runs as it is."""
        self.parts = True
        try:
            yield
        finally:
            self.parts = False

    def clear(self) -> None:
        """Plans are forgotten."""
        self.kinds.clear()
        self.draws.clear()

    def add(self, key: object, kind: Kind) -> Kind:
        """Remember it."""
        if len(self.kinds) >= _MOST_KINDS:
            self.clear()
        self.kinds[key] = kind
        return kind

    def learn(self, key: object, before: TorchGenerators, after: TorchGenerators) -> None:
        """What one forward has drawn."""
        found = Draws.between(before, after)
        self.draws[key] = found if self.draws.get(key, found) == found else None

    def say(self, count: int, why: str | None, seconds: tuple[float, float] | None = None) -> None:
        """``why`` they go one after the other; None: together. ``seconds``: planned, together and one by one."""
        planned = ""
        if seconds is not None and math.isfinite(seconds[1]):
            planned = f" (planned: {format_seconds(seconds[0])} together, {format_seconds(seconds[1])} one by one)"
        how = "together, block by block" if why is None else f"one after the other: {why}"
        self.said = f"{count} micro-batches {how}{planned}"
