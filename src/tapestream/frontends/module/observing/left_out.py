"""Blocks that the profiled call has left out (layers dropped at random): profiled all the same, where they stand."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.blocks import kind_of
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.runner.ambient import unchanged_generators

if TYPE_CHECKING:
    from tapestream.frontends.module.observing.observed import Segment

# A model that drops layers at random is tried this often before it is said to call no block.
_TRIES = 16

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class LeftOut:
    """Which blocks of each container have not been called, and with what they would have been.

    Only in training, and only blocks of the same class and shapes as their neighbours, inside of what was called.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], called: nn.Module) -> None:
        parents = {id(child): id(parent) for parent in model.modules() for child in parent.children()}
        self._container = [(parents.get(id(block)), kind_of(block)) for block in blocks]
        self._drops = model.training
        within = set(map(id, called.modules()))
        self._seen = {position for position, block in enumerate(blocks) if id(block) not in within}
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


def check_called_by_chance(model: nn.Module, device: torch.device, some: Callable[[], bool]) -> None:
    """A call has called no block: raise InputError unless it would have with other random numbers, as ``some`` says."""
    for number in range(_TRIES if model.training else 0):
        with unchanged_generators(device):
            torch.manual_seed(number)
            random.seed(number)
            numpy.random.seed(number)
            if some():
                return
    raise InputError("the model's forward called none of its blocks; name the right ones with blocks=[...]")
