"""`Exchange`: the gradients of a model's blocks, summed over ranks while a backward goes on."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from tapestream.errors import GradientError, InputError
from tapestream.peers.agreement import Agreement, differing
from tapestream.peers.collectives import as_bytes
from tapestream.peers.sums import padded, part_of, sum_spans

AT_ONCE = 2**25
"""Bytes of gradients that are sent at a time, or those of the largest."""
_END = -2  # below the numbers of all that is summed
_WORD = 62  # bits of a number that says which parameters have gradients


class Exchange:
    """``device``: where gradients are added. ``most``: parameters of the largest block. ``state``: hashed, it must be
    equal on all ranks when a backward begins: which parameters have gradients."""

    def __init__(
        self, agreement: Agreement, gradients: str, device: torch.device, most: int, state: Callable[[], bytes]
    ) -> None:
        self.agreement, self._device, self._state = agreement, device, state
        self.scale = 1.0 / agreement.size if gradients == "mean" else 1.0
        self._words = -(-max(1, most) // _WORD)
        self._summed: set[int] = set()
        self._memory: Tensor | None = None
        self._has: list[list[bool]] = []  # by rank, of the parameters of the block that is summed now

    def announce(self, block: int | None, fresh: Sequence[Tensor | None]) -> int | None:
        """See `Sharing`. Raises InputError, on every rank, where ranks run blocks in other orders, or had gradients of
        other parameters before, or one has sparse ones; StorageError where a rank does not come."""
        digest = int.from_bytes(hashlib.sha256(self._state()).digest()[:7], "little") if not self._summed else 0
        there = [one is not None for one in fresh]
        sparse = any(one is not None and one.layout is not torch.strided for one in fresh)
        mine = [_END if block is None else block, len(self._summed), digest, sparse, *_packed(there, self._words)]
        every = self.agreement.told("came to the gradients of a backward", mine)
        self._check(every)
        announced = [row[0] for row in every]
        chosen = max(announced)
        if chosen == _END:
            self._summed.clear()
            return None
        if chosen in self._summed:
            raise InputError(
                f"ranks run the blocks of a streamed model in different orders: block {chosen} of rank "
                f"{announced.index(chosen)} came when its gradients had been summed; keep the order of calls the same"
            )
        self._summed.add(chosen)
        self._has = [_unpacked(row[4:]) if row[0] == chosen else [] for row in every]
        return int(chosen)

    def _check(self, every: Sequence[Sequence[int]]) -> None:
        if len({row[1] for row in every}) > 1:
            raise InputError(
                f"ranks are in different backwards: of this one, {' and '.join(str(row[1]) for row in every)} blocks "
                "were summed, by rank; a backward has failed on some, or did not run: call zero_grad() and run the "
                "next one on every rank"
            )
        if len({row[2] for row in every}) > 1:
            raise InputError(
                "when this backward began, ranks had gradients of different parameters, or different parameters that "
                "require some; zero_grad() and requires_grad must be the same on every rank"
            )
        if any(row[3] for row in every):
            raise InputError("a sparse gradient was to be summed over ranks; use sparse=False for that embedding")

    def fail(self) -> None:
        """See `Sharing`."""
        self._summed.clear()

    def givers(self, number: int) -> list[int]:
        """See `Sharing`."""
        return [rank for rank, has in enumerate(self._has) if number < len(has) and has[number]]

    def sum(
        self, parameters: Sequence[Tensor], fresh: Mapping[int, Tensor], earlier: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """See `Sharing`."""
        found: dict[int, Tensor] = {}
        numbers = [i for i in range(len(parameters)) if i in earlier or self.givers(i)]
        with torch.no_grad():
            for some in _buckets(parameters, numbers):
                self._sum_some(parameters, some, fresh, earlier, found)
            empty = (i for i in numbers if not parameters[i].numel())
            found |= {i: torch.empty_like(parameters[i].detach(), device=self._device) for i in empty}
        return {i: found[i] for i in numbers}

    def _sum_some(
        self,
        parameters: Sequence[Tensor],
        some: Sequence[int],
        fresh: Mapping[int, Tensor],
        earlier: Mapping[int, Tensor],
        found: dict[int, Tensor],
    ) -> None:
        """Of parameters of one dtype: each rank gets its part of everybody's, adds, and sends the sum to all."""
        size, dtype = self.agreement.size, parameters[some[0]].dtype
        lengths = [parameters[i].numel() for i in some]
        stops = list(accumulate(map(padded, lengths)))
        part = part_of(stops[-1], size)
        spans = [(stop - padded(length), length) for stop, length in zip(stops, lengths, strict=True)]
        mine, came, total = self._buffers(dtype, size * part, part)
        for i, (start, length) in zip(some, spans, strict=True):
            if i in fresh:  # what lies elsewhere in it is sent, and added to nothing
                own = mine[start : start + length].copy_(fresh[i].reshape(-1))
                if self.scale != 1.0:
                    own.mul_(self.scale)
        wanted = (
            (start, start + length, self.givers(i), earlier.get(i))
            for i, (start, length) in zip(some, spans, strict=True)
        )
        sum_spans(self.agreement, "came to a sum of gradients", mine, came, total, wanted)
        for i, (start, length) in zip(some, spans, strict=True):
            whole = mine[start : start + length].view(parameters[i].shape)
            found[i] = torch.empty_like(parameters[i].detach(), device=self._device).copy_(whole)

    def _buffers(self, dtype: torch.dtype, whole: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of so many elements: what is sent, what comes, and what it adds up to. They are kept: c10d may let go of them
        later than their memory is counted on."""
        nbytes = [elements * dtype.itemsize for elements in (whole, whole, part)]
        if self._memory is None or self._memory.numel() < sum(nbytes):
            self._memory = None
            self._memory = torch.empty(sum(nbytes), dtype=torch.uint8, device=self._device)
        starts = (0, nbytes[0], nbytes[0] + nbytes[1])
        mine, came, total = (self._memory.narrow(0, at, n).view(dtype) for at, n in zip(starts, nbytes, strict=True))
        return mine, came, total

    def check_step(self, gradients: Iterable[Tensor], options: str) -> None:
        """Raise GradientError, on every rank, where a step would use other ``gradients``, or other ``options`` of an
        optimizer, than those of other ranks."""
        found = [int(as_bytes(padded_words(g)).view(torch.int64).sum()) for g in gradients]
        every = self.agreement.told("began step()", [len(found), sum(found) % 2**62, options])
        if len({tuple(row[:2]) for row in every}) > 1:
            raise GradientError(
                "ranks came to step() with different gradients outside of the blocks: those of a backward that does "
                "not go through the streamed model are not summed over ranks (use ts.sum_over_ranks), and what changes "
                "gradients must do so on every rank"
            )
        if len({row[2] for row in every}) > 1:
            raise differing("the options of optimizers", [row[2] for row in every])


def padded_words(tensor: Tensor) -> Tensor:
    """Its numbers in one dimension, with zeros up to a multiple of eight bytes."""
    flat = tensor.detach().reshape(-1)
    more = -flat.numel() % 8
    return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def _buckets(parameters: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours of one dtype, of at most `AT_ONCE` bytes together; those without elements need not be sent."""
    there = [i for i in numbers if parameters[i].numel()]
    for _, run in groupby(there, key=lambda i: parameters[i].dtype):
        some: list[int] = []
        held = 0
        for i in run:
            nbytes = parameters[i].numel() * parameters[i].dtype.itemsize
            if some and held + nbytes > AT_ONCE:
                yield some
                some, held = [], 0
            some.append(i)
            held += nbytes
        yield some


def buffers_nbytes(blocks: Iterable[Sequence[Tensor]], ranks: int) -> int:
    """Most device bytes of the buffers for sums of these blocks' gradients, which are there all the time."""
    most = 0
    for parameters in blocks:
        trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        for some in _buckets(parameters, trained):
            itemsize = parameters[some[0]].dtype.itemsize
            part = part_of(sum(padded(parameters[i].numel()) for i in some), ranks)
            most = max(most, (2 * ranks + 1) * part * itemsize)
    return most


def gradients_nbytes(parameters: Sequence[Tensor]) -> int:
    """Device bytes of a block's gradients: of another one, say, that others have run and this rank has left out."""
    return sum(p.numel() * p.dtype.itemsize for p in parameters if p.requires_grad)


def _packed(bits: Sequence[bool], words: int) -> list[int]:
    found = [0] * words
    for k, bit in enumerate(bits):
        found[k // _WORD] |= bit << k % _WORD
    return found


def _unpacked(words: Sequence[int]) -> list[bool]:
    return [bool(word >> k & 1) for word in words for k in range(_WORD)]
