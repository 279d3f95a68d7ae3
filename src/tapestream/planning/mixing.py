"""Which blocks are updated on the device where the others are updated in HOST: a few numbers of them, spread evenly."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tapestream.errors import BudgetError
from tapestream.passes.host_updates import Hosted
from tapestream.passes.streaming import Streaming
from tapestream.planning.choices import Terms, in_order
from tapestream.planning.fastest import Found, best_candidate

_EIGHTHS = range(1, 8)  # of the blocks, on the device
_HALVINGS = 2  # of the steps between those, around the best


def best_mix(tapes: Sequence[Streaming], terms: Terms, faster_than: float) -> Found | None:
    """The best plan found of these ``tapes`` that leaves some updates of ``terms.hosted`` to the device; None where
    none can be as fast as ``faster_than`` seconds, or none fits.

    Those that are updated on the device are spread over the chain, its first block among them: backward comes to it
    last, and nothing goes on beside its update. As much of them stays there as pays, see `choices`. The best number
    makes updates in HOST and copies equally long; it is looked for from coarse to fine.
    """
    blocks = _in_order(terms)
    step = max(1, len(blocks) // 8)
    counts = {max(1, len(blocks) * eighths // 8) for eighths in _EIGHTHS} | {1, 2}
    tried, best = set[int](), None
    for _ in range(_HALVINGS + 1):
        counts = {count for count in counts if 0 < count < len(blocks)} - tried
        tried |= counts
        found = _best_of([_mix(blocks, count, terms.hosted) for count in sorted(counts)], tapes, terms, faster_than)
        if found is not None:
            best, faster_than = found, min(faster_than, found.seconds)
        if best is None:
            return None
        step = max(1, step // 2)
        count = len(blocks) - len(_hosted(best) & frozenset(blocks))
        counts = {count - step, count + step}
    return best


def _best_of(mixes: Sequence[Hosted], tapes: Sequence[Streaming], terms: Terms, faster_than: float) -> Found | None:
    streamings = [_mixed(tape, mix, terms) for mix in mixes for tape in tapes]
    listed = [(float(one.seconds[-1]), one) for one in streamings]
    try:
        return best_candidate(in_order(listed, terms), terms, faster_than)
    except BudgetError:
        return None


def _mixed(tape: Streaming, mix: Hosted, terms: Terms) -> Streaming:
    return Streaming.of(tape.schedule, terms.profile, terms.machine, home=terms.home, update=terms.update, hosted=mix)


def _mix(blocks: Sequence[int], count: int, hosted: Hosted) -> Hosted:
    """So many of ``blocks`` on the device."""
    there = frozenset(blocks[number * len(blocks) // count] for number in range(count))
    return replace(hosted, blocks=hosted.blocks - there, late=hosted.late - there)


def _in_order(terms: Terms) -> list[int]:
    """Blocks that may be updated in either place, as the chain comes to them."""
    used: Iterator[int | None] = (stage.block for stage in terms.profile.stages)
    return [block for block in dict.fromkeys(used) if block is not None and block in terms.hosted.blocks]


def _hosted(found: Found) -> frozenset[int]:
    return frozenset() if found.candidate is None else found.candidate.streaming.hosted.blocks
