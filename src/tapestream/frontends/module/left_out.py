"""Blocks that the profiled call has left out (layers dropped at random): profiled all the same, where they stand."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from tapestream.frontends.module.arguments import BlockRun, Link

if TYPE_CHECKING:
    from tapestream.frontends.module.observe import Segment

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class LeftOut:
    """Which blocks of each container have not been called, and with what they would have been.

    Only in training, and only blocks of the same class and shapes as their neighbours.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        parents = {id(child): id(parent) for parent in model.modules() for child in parent.children()}
        self._container = [(parents.get(id(block)), type(block), shapes_of(block)) for block in blocks]
        self._drops = model.training
        self._seen: set[int] = set()
        self._last: dict[object, tuple[Arguments, Link, Segment]] = {}

    def before(self, position: int) -> Iterator[int]:
        """Blocks of the same container that should have come before block ``position``."""
        for other in range(position if self._drops else 0):
            if self._container[other] == self._container[position] and other not in self._seen:
                self._seen.add(other)
                yield other

    def note(
        self,
        position: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: BlockRun,
        link: Link,
        segment: "Segment",
    ) -> Arguments:
        """Block ``position`` was called; returns what the next one would be given."""
        self._seen.add(position)
        following = run.following(args, kwargs, link)
        self._last[self._container[position]] = (following, link, segment)
        return following

    def rest(self) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any], Link, "Segment"]]:
        """Per container the first block after the last that was called, with its arguments; once it has been noted,
        the next one."""
        for position, container in enumerate(self._container):
            if self._drops and position not in self._seen and container in self._last:
                (args, kwargs), link, segment = self._last[container]
                yield position, args, kwargs, link, segment


def shapes_of(block: nn.Module) -> tuple[object, ...]:
    """The shapes of its parameters."""
    return tuple(p.shape for p in block.parameters())
