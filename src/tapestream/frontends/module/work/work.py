"""`Work`: the operations of a model between two of its blocks, which recomputes run again."""

from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from tapestream.errors import GradientError
from tapestream.frontends.module.work.operation import Constant, Operation, Source, Value
from tapestream.runner.ambient import unchanged_generators
from tapestream.runner.modes import Surroundings
from tapestream.runner.state import State

_Looks = tuple[torch.Size, torch.dtype]


@dataclass(slots=True)
class Border:
    """Where the work between two blocks is cut in two: the state of the chain there, and that of the second block.

    ``cut``: the numbers of the values that the state of the chain is made of; ``chain``: it, without tensors. The work
    before it belongs to the stage of the first block, that behind it to the second. ``sources``: where each tensor of
    the second block's state comes from; ``block``: that state, without tensors; ``looks``: shapes and dtypes of it.
    """

    cut: tuple[int, ...]
    chain: State
    sources: tuple[Source, ...]
    block: State
    looks: tuple[_Looks, ...]


@dataclass(slots=True)
class Work:
    """Values are numbered. The first ``count`` are what the block before had: the state of the chain, if work led from
    that to the block's own, the block's own, and what the block has made. Then comes what ``operations`` make.

    ``border`` None: the next block goes on from what this one has made. ``saved``: by (operation, place), what a
    recompute has made of the saved tensors that were dropped, until autograd has used them. ``drops``: there are such.
    ``place``: segment and stage of the block before it.
    """

    device: torch.device
    surroundings: Surroundings
    count: int
    operations: list[Operation] = field(default_factory=list)
    border: Border | None = None
    saved: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    drops: bool = False
    place: tuple[int, int] = (0, 0)

    def onward(self, had: Iterable[torch.Tensor], made: State, *, saving: bool) -> State:
        """The state of the chain behind the block, of what the block ``had`` and has ``made``. With ``saving``, the
        saved tensors that were dropped are there again.

        Raises GradientError where a constant has changed, or the operations make something else.
        """
        values = dict(enumerate((*had, *made.tensors)))
        border = self.border
        self._run(values, () if border is None else border.cut, frozenset(values), saving=saving)
        if border is None:
            return made
        return replace(border.chain, tensors=tuple(values[number].detach() for number in border.cut))

    def block_state(self, chain: State) -> State:
        """The state of the next block, of the state of the chain. Raises GradientError as `onward`."""
        border = self.border
        assert border is not None
        values = dict(zip(border.cut, chain.tensors, strict=True))
        self._run(values, numbers_of(border.sources), frozenset(border.cut), saving=False)
        tensors = tuple(one.tensor(values).detach() for one in border.sources)
        if tuple((t.shape, t.dtype) for t in tensors) != border.looks:
            raise _differs()
        return replace(border.block, tensors=tensors)

    def needed(self, wanted: Iterable[int], known: Container[int], *, saving: bool = False) -> list[int] | None:
        """The operations that make ``wanted``, and with ``saving`` what was dropped, in order; None where they need
        more than what is ``known``."""
        open_, order = {number for number in wanted if number not in known}, list[int]()
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            made = set(operation.made.values())
            if (saving and operation.dropped) or not open_.isdisjoint(made):
                open_ = (open_ - made) | {one for one in operation.used() if one not in known}
                order.append(number)
        return None if open_ else order[::-1]

    def _run(
        self, values: dict[int, torch.Tensor], wanted: Iterable[int], known: Container[int], *, saving: bool
    ) -> None:
        """Run what is needed; ``values`` that are not ``wanted`` go as soon as nothing uses them."""
        kept = set(wanted)
        order = self.needed(kept, known, saving=saving)
        if order is None:
            raise _differs()
        last = {one: number for number in order for one in self.operations[number].used()}
        draws = any(self.operations[number].generators is not None for number in order)
        for one in [one for one in values if one not in kept and one not in last]:
            del values[one]
        if not order:
            return
        with self.surroundings.again(), unchanged_generators(self.device) if draws else nullcontext():
            for number in order:
                self._run_one(number, values, saving=saving)
                for one in [one for one, at in last.items() if at == number and one not in kept]:
                    values.pop(one, None)

    def _run_one(self, number: int, values: dict[int, torch.Tensor], *, saving: bool) -> None:
        operation = self.operations[number]
        found = list[torch.Tensor]() if saving and operation.dropped else None
        operation.run(values, found, self.device)
        if found is not None:
            if len(found) != operation.saves:
                raise _differs()
            self.saved.update({(number, place): found[place] for place in operation.dropped})


def numbers_of(sources: Sequence[Source]) -> list[int]:
    """The numbers of the values among them."""
    return [one.number for one in sources if isinstance(one, Value)]


def constants_of(work: Work) -> list[torch.Tensor]:
    """Tensors that it holds until the backward of the block before it."""
    found = [one for operation in work.operations for one in operation.constants()]
    sources = () if work.border is None else work.border.sources
    return found + [one.held for one in sources if isinstance(one, Constant)]


def _differs() -> GradientError:
    return GradientError(
        "what the model does between two blocks made other tensors when it was run again than at first; it must depend "
        "on nothing but what the blocks make, its parameters and the global random generators"
    )


@dataclass(frozen=True, slots=True)
class _Behind:
    """See `executor.moves.Onward`."""

    work: Work
    had: tuple[torch.Tensor, ...]

    @property
    def saves(self) -> bool:
        """Whether there are saved tensors that were dropped."""
        return self.work.drops

    def __call__(self, made: State, *, saving: bool) -> State:
        """The state of the chain, of what the block has ``made``."""
        return self.work.onward(self.had, made, saving=saving)


class Works:
    """Those of one chain of a call, by the stages that they follow and lead to: see `executor.moves.Between`.

    ``entering``: the states of blocks in their first run, which nothing needs to make.
    """

    def __init__(self) -> None:
        self.after: dict[int, Work] = {}
        self.before: dict[int, Work] = {}
        self.entering: dict[int, State] = {}

    def come_in(self, k: int, state: State) -> State:
        """The state of the block of stage ``k``, of state k of the chain."""
        if k in self.entering:
            return self.entering.pop(k)
        return self.before[k].block_state(state) if k in self.before else state

    def behind(self, k: int, chain: State, own: State) -> "_Behind | None":
        """What makes state k+1 of the chain again, of state k, of the block's own, and of what the block makes."""
        if k not in self.after:
            return None
        return _Behind(self.after[k], (*chain.tensors, *own.tensors) if k in self.before else own.tensors)

    def forget(self, k: int) -> None:
        """The backward of stage ``k`` begins: no stage from there on runs again."""
        work = self.after.pop(k, None)
        if work is not None:
            work.saved.clear()
