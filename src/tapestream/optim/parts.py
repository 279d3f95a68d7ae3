"""How the optimizer's state of a block is cut into parts that are moved and updated one after the other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tapestream.optim.state import StateShape
from tapestream.storage.blocks import ParameterBlock, Piece, StatePart
from tapestream.storage.layout import Layout
from tapestream.storage.transfer import round_up

LEAST_PART_NBYTES = 2**20  # smaller copies cost more in latency than they spare in memory
_SHARE = 16  # of the device budget, at most one in so many bytes is a part
_OF_HOST = 128  # one in so many bytes of a host through which parts go to a disk: several are on their way at once
_MOST, _MOST_BY_HOST = 64, 8  # parts of a block: more would make plans long
GRAIN = 1024  # elements: cuts at multiples lie at multiples of 512 bytes for every width of element


@dataclass(frozen=True, slots=True)
class Member:
    """Parameter ``number`` of a block and the ``state`` that an optimizer keeps for it. ``rule_nbytes``: of each
    temporary that the rule makes, a tensor like what it updates; ``cast_nbytes``: of the gradient in another type;
    ``divisible``: whether the optimizer treats its elements independently."""

    number: int
    shape: tuple[int, ...]
    state: StateShape
    rule_nbytes: int
    cast_nbytes: int = 0
    divisible: bool = False

    @property
    def elements(self) -> int:
        """How many numbers the parameter holds."""
        return math.prod(self.shape)

    @property
    def extra_nbytes(self) -> int:
        """Transient bytes of an update of it all: those of the rule, and the gradient's cast."""
        return self.step_nbytes + self.cast_nbytes

    @property
    def step_nbytes(self) -> int:
        """Two temporaries of the rule, or what it was seen to make beside the state."""
        return max(2 * self.rule_nbytes, self.state.later_nbytes)

    @property
    def first_nbytes(self) -> int:
        """What the update that makes the state holds, the state included."""
        return max(self.state.nbytes + 2 * self.rule_nbytes, self.state.first_nbytes) + self.cast_nbytes

    @property
    def nbytes(self) -> int:
        """What counts for the size of a part: the state, or the temporaries where they are more."""
        return max(self.state.nbytes, self.extra_nbytes)


def part_limits(device_nbytes: int | None, largest_nbytes: int, passed_nbytes: int | None = None) -> tuple[int, ...]:
    """The most bytes that a part may have, as is preferred under a device budget, then the least that is tried where a
    plan needs less; none without a budget. ``largest_nbytes``: of a block's whole state; ``passed_nbytes``: of the host
    budget, where state passes the host on its way to and from a disk."""
    if device_nbytes is None:
        return ()
    least, preferred = max(LEAST_PART_NBYTES, largest_nbytes // _MOST), device_nbytes // _SHARE
    if passed_nbytes is not None:
        preferred = min(preferred, max(passed_nbytes // _OF_HOST, largest_nbytes // _MOST_BY_HOST))
    return tuple(dict.fromkeys((max(least, preferred), least)))


def passed_nbytes(lives_nbytes: int, device_nbytes: int | None, host_nbytes: int | None) -> int | None:
    """The host budget where so many bytes of blocks, which live there or below, surely find no room in it and on the
    device, which has other things to hold: what does not passes the host. None where they may."""
    if host_nbytes is None or device_nbytes is None or lives_nbytes <= host_nbytes + 2 * device_nbytes // 3:
        return None
    return host_nbytes


def state_parts(
    members: Sequence[Member], limit_nbytes: int | None, *, together: bool = False
) -> tuple[StatePart, ...]:
    """The parts of a block's state, of at most ``limit_nbytes`` bytes each but for alignment and for parameters that
    cannot be cut; a parameter that is larger than a part is cut into about equal pieces. ``together``: whether the
    rule updates all tensors of a part at once, as foreach forms do."""
    found: list[StatePart] = []
    pieces: list[tuple[Member, Piece]] = []
    held = 0
    for member, piece in (pair for one in members for pair in _pieces(one, limit_nbytes)):
        nbytes = _share(member, piece, member.state.nbytes if piece.whole else member.nbytes)
        if pieces and limit_nbytes is not None and held + nbytes > limit_nbytes:
            found.append(_part(pieces, together))
            pieces, held = [], 0
        pieces.append((member, piece))
        held += nbytes
    return (*found, _part(pieces, together)) if pieces else ()


def _pieces(member: Member, limit_nbytes: int | None) -> Iterator[tuple[Member, Piece]]:
    elements = member.elements
    if limit_nbytes is None or member.nbytes <= limit_nbytes or not member.divisible or elements <= GRAIN:
        yield member, Piece(member.number, 0, elements)
        return
    count = -(-member.nbytes // limit_nbytes)
    length = -(-elements // (count * GRAIN)) * GRAIN
    for start in range(0, elements, length):
        stop = min(elements, start + length)
        yield member, Piece(member.number, start, stop, whole=stop - start == elements, first=start == 0)


def shard_parts(
    block: ParameterBlock, members: Sequence[Member], limit_nbytes: int | None, *, together: bool = False
) -> tuple[StatePart, ...]:
    """The same of the state of a block's shard: runs of its bytes, as many and with as much room on every rank, whose
    plans are one. A parameter of which the rank has nothing is a piece without elements, so that what counts its steps
    is the same on all."""
    if not members:
        return ()
    own = block.layout.nbytes // block.share.ranks
    state = -(-sum(one.nbytes for one in members) // block.share.ranks)
    count = 1 if limit_nbytes is None else max(1, min(_MOST, -(-state // limit_nbytes)))
    length = max(1, round_up(-(-own // count)))
    every = [
        [_part(pieces, together) for pieces in _shard_pieces(block, members, rank * own, own, length)]
        for rank in range(block.share.ranks)
    ]
    return tuple(_with_room_for(mine, [parts[k] for parts in every]) for k, mine in enumerate(every[block.share.rank]))


def _shard_pieces(
    block: ParameterBlock, members: Sequence[Member], first: int, nbytes: int, length: int
) -> list[list[tuple[Member, Piece]]]:
    """By part, what ``length`` bytes each of the shard that begins at byte ``first`` have of every parameter."""
    found: list[list[tuple[Member, Piece]]] = []
    seen: set[int] = set()
    for start in range(first, first + max(1, nbytes), length):
        spans = block.layout.within(start, min(start + length, first + nbytes))
        there = {block.trained[at]: span for at, span in spans.items()}
        found.append([])
        for one in members:
            if one.number in there:
                a, b = there[one.number]
                whole = b - a == one.elements
                found[-1].append((one, Piece(one.number, a, b, whole=whole, first=one.number not in seen)))
                seen.add(one.number)
    absent = [(one, Piece(one.number, 0, 0, whole=not one.elements)) for one in members if one.number not in seen]
    found[0] += absent
    return found


def _with_room_for(part: StatePart, alike: Sequence[StatePart]) -> StatePart:
    nbytes, extra = max(one.nbytes for one in alike), max(one.extra_nbytes for one in alike)
    layout = part.layout or Layout((), (), (), 0)
    return replace(part, layout=replace(layout, nbytes=nbytes) if nbytes else None, extra_nbytes=extra)


def _part(pieces: Sequence[tuple[Member, Piece]], together: bool) -> StatePart:
    slots: list[tuple[int, str]] = []
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = []
    for number, (member, piece) in enumerate(pieces):
        for name, shape, dtype in member.state.tensors:
            slots.append((number, name))
            tensors.append((shape if piece.whole else (piece.elements,), dtype))
    layout = Layout.of(tensors) if tensors else None
    extra = _extra_nbytes(pieces, together, layout.nbytes if layout else 0)
    return StatePart(tuple(piece for _, piece in pieces), tuple(slots), layout, extra)


def _extra_nbytes(pieces: Sequence[tuple[Member, Piece]], together: bool, part_nbytes: int) -> int:
    """Transient bytes of an update: casts of all gradients, and temporaries of the rule, of all pieces or of one; a
    loop holds the last temporary of a piece until the next one's replaces it. Or those of the first update, whose
    pieces come one by one, the largest first: the rule makes the state of each, the very first not beside the part's
    own. (One that has no gradient then, and gets one later, takes its state's bytes in addition.)"""
    casts = [_share(member, piece, member.cast_nbytes) for member, piece in pieces]
    own = [_share(member, piece, member.rule_nbytes) for member, piece in pieces]
    steps = [_share(member, piece, member.step_nbytes) for member, piece in pieces]
    ever = sum(steps) if together or not steps else max(b + n for b, n in zip((0, *own), steps, strict=False))
    if not pieces:
        return 0
    largest, *others = sorted(pieces, key=lambda pair: -pair[1].elements)
    made = [_share(member, piece, member.first_nbytes) for member, piece in others]
    alone = max(_share(*largest, largest[0].state.nbytes), _share(*largest, largest[0].first_nbytes) - part_nbytes)
    return max(sum(casts) + ever, alone, *made)


def _share(member: Member, piece: Piece, nbytes: int) -> int:
    """As much of ``nbytes`` as the piece has of the member's elements."""
    return nbytes if piece.whole else -(-nbytes * piece.elements // member.elements)
