"""As many things beside a plan as its budget allows."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

_TRIES = 32


class _OfStage(Protocol):
    @property
    def stage(self) -> int: ...


Thing = TypeVar("Thing", bound=_OfStage)
Judged = TypeVar("Judged")


def most_that_fit(
    things: Sequence[Thing], judge: Callable[[Sequence[Thing]], Judged | None]
) -> tuple[Judged, list[Thing]] | None:
    """What ``judge`` makes of ``things``, as many of the first as it takes without answering None, and these; None for
    none. More of them never take less memory. What does not fit, with what comes later of its stage, is left out, a few
    times over: at one stage memory may be short where it is not at others."""
    found, chosen, rest = None, list[Thing](), list(things)
    for _ in range(_TRIES):
        least, most, step = 0, len(rest), 1
        while least < most:
            count = min(least + step, (least + most + 1) // 2)
            one = judge([*chosen, *rest[:count]])
            if one is None:
                most, step = count - 1, most
            else:
                found, least, step = one, count, 2 * step
        chosen += rest[:least]
        if least == len(rest):
            break
        short = rest[least].stage
        rest = [thing for thing in rest[least + 1 :] if thing.stage != short]
    return None if found is None else (found, chosen)
