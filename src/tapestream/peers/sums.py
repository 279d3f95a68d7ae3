"""Sums over ranks in the order of ranks: the bits that one process gets that adds the same numbers in that order.

c10d's own reductions add in an order that depends on where in a bucket a number lies (a ring starts elsewhere for each
part), so that the same gradients have other bits in another step. Sending each rank its part of everybody's numbers
moves the same bytes as a ring does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from tapestream.errors import InputError
from tapestream.peers.agreement import Agreement, differing
from tapestream.peers.collectives import Group

_WHAT = "began a sum over ranks"
Span: TypeAlias = tuple[int, int, Sequence[int], Tensor | None]
"""Elements from one to another, the ranks that have numbers for them, and what these are added to (None: nothing)."""
_STEP = 64  # elements: where parts are cut, so that kernels see as many as in a tensor of its own


@overload
def sum_over_ranks(tensors: Tensor, group: Group | None = None) -> Tensor: ...
@overload
def sum_over_ranks(tensors: Sequence[Tensor | None], group: Group | None = None) -> list[Tensor | None]: ...
def sum_over_ranks(
    tensors: Tensor | Sequence[Tensor | None], group: Group | None = None
) -> Tensor | list[Tensor | None]:
    """The sum over ranks of each tensor, added in the order of ranks and in the tensor's dtype.

    On every rank these are the bits of one process that adds rank 0's tensor, rank 1's and so on, however many ranks
    there are and whatever else is summed with it. (Those of ``all_reduce`` are not.) A rank that has none gives None,
    which adds nothing: ``ts.sum_over_ranks([p.grad for p in parameters])`` sums the gradients of a batch that ranks
    have divided. ``group``: a process group, or a DeviceMesh of one dimension (None: the default group). Each rank must
    call it, with as many tensors, of equal shapes and dtypes.

    Returns new tensors, None where no rank has one; on the device of the rank's own, or of the first that it gave.
    Sends 2 (N - 1) / N of the bytes, and takes twice the bytes of ``tensors`` meanwhile. Raises InputError, on every
    rank, for tensors that differ, and StorageError where not all ranks come within the group's timeout.
    """
    alone = isinstance(tensors, Tensor)
    given: list[Tensor | None] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    agreement = Agreement.of(group)
    try:
        for one in given:
            _check(one)
    except InputError as error:
        if agreement is not None:  # the others wait
            agreement.told(_WHAT, str(error))
        raise
    if agreement is None:
        found = [None if one is None else one.detach().clone() for one in given]
    else:
        with torch.no_grad():
            found = _summed(given, agreement)
    return found[0] if alone else found  # type: ignore[return-value]  # it gave one


@dataclass(frozen=True, slots=True)
class _Place:
    """Elements ``start`` to ``stop`` of the run of numbers of one dtype: tensor ``number``, which ``ranks`` have."""

    number: int
    shape: tuple[int, ...]
    start: int
    stop: int
    ranks: tuple[int, ...]


def _check(one: object) -> None:
    if one is None:
        return
    if not isinstance(one, Tensor):
        raise InputError(f"sums over ranks are of tensors, not of a {type(one).__name__}; None stands for none")
    if one.layout is not torch.strided or one.is_meta or not _adds(one.dtype):
        raise InputError(
            f"a sum over ranks of a tensor of {one.dtype} and {one.layout} on {one.device} was asked for; numbers in "
            "strided tensors can be added (to_dense() makes one of a sparse tensor)"
        )


def _adds(dtype: torch.dtype) -> bool:
    one = torch.zeros(1, dtype=torch.uint8, device="cpu")
    try:
        one.to(dtype).add_(one.to(dtype))
    except RuntimeError:  # of those that only store numbers
        return False
    return dtype is not torch.bool


def _summed(given: list[Tensor | None], agreement: Agreement) -> list[Tensor | None]:
    looks = [None if one is None else [str(one.dtype).removeprefix("torch."), list(one.shape)] for one in given]
    every = agreement.told(_WHAT, looks)
    for rank, one in enumerate(every):
        if isinstance(one, str):
            raise InputError(f"rank {rank} could not begin a sum over ranks: {one}")
    if len({len(one) for one in every}) > 1:
        raise differing("the numbers of tensors to sum over ranks", [len(one) for one in every])
    at_hand = next((one.device for one in given if one is not None), torch.device("cpu"))
    places: dict[str, list[_Place]] = {}
    for number, ones in enumerate(zip(*every, strict=True)):
        there = [one for one in ones if one is not None]
        if any(one != there[0] for one in there):
            raise differing(f"the tensors number {number} to sum over ranks", [one or "has none" for one in ones])
        if there:
            dtype, shape = there[0]
            run = places.setdefault(dtype, [])
            start = padded(run[-1].stop) if run else 0
            ranks = tuple(rank for rank, one in enumerate(ones) if one is not None)
            run.append(_Place(number, tuple(shape), start, start + math.prod(shape), ranks))
    found: list[Tensor | None] = [None] * len(given)
    for name, run in places.items():
        _sum_run(getattr(torch, name), run, given, found, agreement, at_hand)
    return found


def _sum_run(
    dtype: torch.dtype,
    run: Sequence[_Place],
    given: Sequence[Tensor | None],
    found: list[Tensor | None],
    agreement: Agreement,
    device: torch.device,
) -> None:
    """All tensors of one dtype, laid out one after the other and cut into as many parts as there are ranks."""
    part = part_of(run[-1].stop, agreement.size)
    mine = torch.zeros(agreement.size * part, dtype=dtype, device=device)
    for place in run:
        own = given[place.number]
        if own is not None:
            mine[place.start : place.stop] = own.detach().reshape(-1)
    came, total = torch.empty_like(mine), torch.zeros(part, dtype=dtype, device=device)
    spans = ((place.start, place.stop, place.ranks, None) for place in run)
    sum_spans(agreement, _WHAT, mine, came, total, spans)
    for place in run:
        own = given[place.number]
        whole = mine[place.start : place.stop].view(place.shape).clone()
        found[place.number] = whole if own is None else whole.to(own.device)


def sum_spans(
    agreement: Agreement, what: str, mine: Tensor, came: Tensor, total: Tensor, spans: Iterable[Span]
) -> None:
    """Each rank gets its part of everybody's ``mine`` in ``came``, adds it up in ``total``, and sends that to all:
    ``mine`` has the sums of the ``spans`` afterwards, and elsewhere anything. Raises StorageError."""
    collectives, part = agreement.collectives, total.numel()
    agreement.waited(what, lambda: collectives.exchange(came, mine).wait())
    first = agreement.rank * part
    for start, stop, ranks, earlier in spans:
        low, high = max(start, first), min(stop, first + part)
        if low >= high:
            continue
        own, begun = total[low - first : high - first], earlier is not None
        if earlier is not None:
            own.copy_(earlier.reshape(-1)[low - start : high - start])
        for r in ranks:
            one = came[r * part + low - first : r * part + high - first]
            own.add_(one) if begun else own.copy_(one)
            begun = True
    agreement.waited(what, lambda: collectives.gather(mine, total).wait())


def padded(elements: int) -> int:
    """As many elements, or more, so that the next tensor starts where kernels see it as one of its own."""
    return -(-elements // _STEP) * _STEP


def part_of(elements: int, ranks: int) -> int:
    """Elements of each rank's part of so many."""
    return padded(-(-elements // ranks))
