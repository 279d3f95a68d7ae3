"""`Inner`: the torch optimizer that is shown one part of a step after the other."""

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from tapestream.capture.fused_steps import unseen
from tapestream.optim.common import Common, Way
from tapestream.optim.state import OptimizerClass

StandIns = Callable[[int], list[torch.Tensor]]
"""Small tensors without gradients, for a group by its number."""


class Inner:
    """Made once, with one tensor: its constructor takes longer than a small step."""

    def __init__(
        self, cls: OptimizerClass, options: Mapping[str, Any], common: Common, way: Way, stand_ins: StandIns
    ) -> None:
        self._cls, self._options, self._way = cls, options, way
        self.common, self._stand_ins = common, stand_ins
        self._made: torch.optim.Optimizer | None = None
        self._constructor_makes_state = False  # as Adagrad's in older PyTorch, where a step expects to find it

    @property
    def replaces(self) -> bool:
        """Whether it makes its state anew in each step."""
        return self._way.replaces

    def follow(self, way: Way) -> None:
        """Groups have been added."""
        self._way = self.common.way = way

    def target(self, memory: torch.Tensor) -> torch.Tensor:
        """What the optimizer is to see of a tensor."""
        return torch.nn.Parameter(memory) if self._way.parameters else memory

    def put_back(self, target: torch.Tensor, memory: torch.Tensor) -> None:
        """Let the memory have what a step left in its target, if that has other memory now (``p.data = ...``)."""
        if self._way.parameters and target.data_ptr() != memory.data_ptr():
            memory.copy_(target.detach())

    def step(
        self, groups: Sequence[Mapping[str, Any]], members: Mapping[int, list[Any]], state: MutableMapping[Any, Any]
    ) -> None:
        """One step on ``members``, targets by the number of their group; ``state``: of those that have some."""
        absent = [n for n in range(len(groups)) if n not in members] if self._way.all_groups else []
        shown = sorted(members.items())
        if absent:
            shown = sorted([*shown, *((number, self._stand_ins(number)) for number in absent)])
        if self._made is None or (self._constructor_makes_state and not state):
            one = next(iter(members.values()))[0]
            state_made = self._make(groups, [(n, p if n in absent else p[:1]) for n, p in shown]).get(one)
            self._constructor_makes_state = bool(state_made)
            if state_made and not state:  # a first step, which is one tensor's
                state[one] = state_made
        assert self._made is not None
        self.common.step(self._made, shown, state, frozenset(absent))

    def _make(
        self, groups: Sequence[Mapping[str, Any]], shown: Sequence[tuple[int, list[Any]]]
    ) -> Mapping[torch.Tensor, Any]:
        """Make the optimizer: of one tensor where one will do, as there is room for the state of one twice."""
        first = shown if self._way.all_groups else shown[:1]
        made = self._made = unseen(self._cls([{**groups[n], "params": p} for n, p in first], **self._options))
        self.common.adopt(made)
        return made.state

    def finish(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The step is over. Groups no tensor of which had a gradient are counted, too, as plain PyTorch would."""
        common = self.common
        unseen_groups = [n for n in range(len(groups)) if n not in common.seen]
        if self._way.counts and unseen_groups and not (self._way.all_groups and common.begun):
            self._count(groups, unseen_groups)
        common.end()

    def _count(self, groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
        shown = [(number, self._stand_ins(number)) for number in numbers]
        if self._made is None:
            self._make(groups, shown)
        assert self._made is not None
        self.common.step(self._made, shown, defaultdict(dict), frozenset(numbers))
