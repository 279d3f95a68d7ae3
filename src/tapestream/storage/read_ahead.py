"""`pieces_of`: the bytes of many tensors in turn; what lies in files comes in large pieces, while others are used.

A mapping brings its file page by page where it is touched, and copies it through the page cache: half of a processor's
time, beside a disk that waits in between.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tapestream.storage.disk import Extent
from tapestream.storage.mapped import place_of
from tapestream.storage.transfer import ALIGNMENT, large_pages, round_up

Parts = Callable[[torch.Tensor], Iterable[torch.Tensor]]
_BUFFERS = 5  # one is used while others are filled: reads wait for each other beside a disk that is written to
_SPAN_NBYTES = 4 << 20  # of a buffer, and of what is given at once


@dataclass(slots=True)
class _Span:
    """Bytes ``start`` to ``stop`` of an extent, and the parts of them that are wanted, by the tensor's name. Without an
    extent: a tensor that is at hand."""

    extent: Extent | None
    start: int = 0
    stop: int = 0
    wanted: list[tuple[str, int, int]] = field(default_factory=list)
    at_hand: tuple[str, torch.Tensor] | None = None

    def takes(self, extent: Extent, start: int, stop: int) -> bool:
        """Whether these bytes come next, and still fit."""
        near = self.stop <= start <= self.stop + ALIGNMENT
        return self.extent is extent and near and stop - self.start <= _SPAN_NBYTES

    def read_into(self, buffer: torch.Tensor) -> None:
        """From the disk, whole pages."""
        assert self.extent is not None
        nbytes = min(round_up(self.stop), self.extent.nbytes) - self.start
        self.extent.read_into(buffer[:nbytes], offset=self.start)


def pieces_of(
    tensors: Iterable[tuple[str, torch.Tensor]], parts: Parts = lambda tensor: (tensor,)
) -> Generator[tuple[str, torch.Tensor]]:
    """Names and uint8 pieces on the CPU, a few MiB each: one after the other, a tensor's pieces are its bytes in
    row-major order. A piece may change when the next one is asked for.

    ``parts``: tensors whose elements, one after the other, are those of the one given. A tensor that lies in another
    order is copied first. Raises StorageError when a disk fails.
    """
    buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * _BUFFERS
    ready: deque[tuple[_Span, torch.Tensor, Future[None] | None]] = deque()
    with ThreadPoolExecutor(_BUFFERS - 1, "tapestream-read") as threads:
        for number, span in enumerate(_spans(tensors, parts)):
            if len(ready) == _BUFFERS:
                yield from _given(*ready.popleft())
            buffer, future = buffers[number % _BUFFERS], None
            if span.extent is not None:
                if not buffer.numel():
                    buffer = buffers[number % _BUFFERS] = torch.from_numpy(large_pages(_SPAN_NBYTES))
                future = threads.submit(span.read_into, buffer)
            ready.append((span, buffer, future))
        while ready:
            yield from _given(*ready.popleft())


def _given(span: _Span, buffer: torch.Tensor, future: Future[None] | None) -> Generator[tuple[str, torch.Tensor]]:
    if future is None:
        assert span.at_hand is not None
        name, flat = span.at_hand[0], _flat(span.at_hand[1])
        yield from ((name, flat[i : i + _SPAN_NBYTES].cpu()) for i in range(0, flat.numel(), _SPAN_NBYTES))
        return
    future.result()
    for name, start, stop in span.wanted:
        yield name, buffer[start - span.start : stop - span.start]


def _spans(tensors: Iterable[tuple[str, torch.Tensor]], parts: Parts) -> Iterator[_Span]:
    """What is read at once, in the order in which it is wanted."""
    open_span: _Span | None = None
    for name, tensor in tensors:
        for part in parts(tensor):
            place = place_of(part) if part.is_contiguous() and part.nbytes else None
            if place is None or not place[0].direct:
                if open_span is not None:
                    yield open_span
                    open_span = None
                yield _Span(None, at_hand=(name, part))
                continue
            extent, at = place
            end = at + part.nbytes
            while at < end:
                if open_span is None or not open_span.takes(extent, at, min(end, at + ALIGNMENT)):
                    if open_span is not None:
                        yield open_span
                    first = at - at % ALIGNMENT
                    open_span = _Span(extent, first, first)
                stop = min(end, open_span.start + _SPAN_NBYTES)
                open_span.wanted.append((name, at, stop))
                open_span.stop = at = stop
    if open_span is not None:
        yield open_span


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
