"""`lengthened`: the outline of a deep model, found on a shallow one of the same blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tapestream.frontends.outlines.outline import Outline, Segment

T = TypeVar("T")


def lengthened(found: Outline, layer: range, times: int) -> Outline:
    """``found`` with the blocks at the positions ``layer`` called so many times more, one layer after the other, each
    with parameters of its own.

    They must be called in a row, in one segment, share no parameters with others, and hold no buffers. Nothing but
    blocks runs between them: what does is counted as often as in the shallow model.
    """
    end, more = layer.stop, times * len(layer)
    own = [use for use in found.uses[layer.start : end] if use is not None]
    first = own[0]
    assert own == [first + k for k in range(len(layer))]
    assert all(found.uses.count(use) == 1 for use in own)
    last = first + len(layer)
    uses = [None if use is None else _moved(use, last, more) for use in found.uses]
    inserted = [first + k for k in range(len(layer), len(layer) + more)]
    return replace(
        found,
        segments=tuple(_longer(segment, layer, times) for segment in found.segments),
        modules=_repeated(found.modules, layer, times),
        wide=found.wide + more,
        uses=(*uses[:end], *inserted, *uses[end:]),
        groups=_repeated(found.groups, range(first, last), times),
    )


def _longer(segment: Segment, layer: range, times: int) -> Segment:
    more = times * len(layer)
    positions = [k if k < layer.stop else k + more for k in segment.positions]
    if layer.start not in segment.positions:
        return replace(segment, positions=positions)
    k = segment.positions.index(layer.start)
    stages = range(k, k + len(layer))
    assert segment.positions[k : stages.stop] == [*layer]
    return replace(
        segment,
        stages=[*_repeated(segment.stages, stages, times)],
        works=[*_repeated(segment.works, stages, times)],
        behind=[*_repeated(segment.behind, stages, times)],
        positions=[*positions[: stages.stop], *range(layer.stop, layer.stop + more), *positions[stages.stop :]],
        spans=[*_spans(segment.spans, stages, times)],
    )


def _spans(spans: Sequence[tuple[int, int, int]], stages: range, times: int) -> Iterator[tuple[int, int, int]]:
    """Those of the longer segment: what the stages make and hand on to nobody is made each time."""
    more = times * len(stages)
    for first, last, nbytes in spans:
        yield _moved(first, stages.stop + 1, more), _moved(last, stages.stop + 1, more), nbytes
        if first == last and first - 1 in stages:
            yield from ((first + k, last + k, nbytes) for k in range(len(stages), more + 1, len(stages)))


def _moved(number: int, end: int, more: int) -> int:
    return number if number < end else number + more


def _repeated(items: Sequence[T], which: range, times: int) -> tuple[T, ...]:
    """``items`` with some of them standing there so many times more."""
    return (*items[: which.stop], *(item for _ in range(times) for item in items[which.start : which.stop]),
            *items[which.stop :])  # fmt: skip
