"""`Steps`: the torch optimizer that is shown blocks, and the one that is shown the rest; the same but in RAM."""

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.executor.blocks import Updater
from tapestream.executor.updates import PartUpdate
from tapestream.optim.common import Common, Way
from tapestream.optim.inner import Inner
from tapestream.optim.on_cpu import GroupsOnCpu
from tapestream.optim.rule import Rule
from tapestream.optim.state import OptimizerClass
from tapestream.optim.tried import Tried
from tapestream.planning.where import Where


class Steps:
    """``groups()`` gives the param_groups as users see them. ``rule`` updates blocks: with ``where="host"`` by an
    optimizer of their own, if nothing is common to all that it steps. ``inner`` updates what lies outside the blocks.
    ``late``: whether updates of blocks may go on after their step. ``device``: where they are otherwise; ``masters``:
    see `Rule`; ``go_on``: whether updates could, as nothing has to come from a disk. ``on_device``: blocks that are
    updated there with ``where="mixed"``, None before that was said. Raises InputError for such an optimizer that keeps
    something common."""

    def __init__(
        self,
        cls: OptimizerClass,
        options: Mapping[str, Any],
        groups: Callable[[], Sequence[dict[str, Any]]],
        masters: Container[int],
        device: torch.device,
        where: Where,
        update: str,
        *,
        go_on: bool,
    ) -> None:
        cpu, self._where, self._eager = torch.device("cpu"), where, update == "backward"
        on_cpu = None if where == "device" else GroupsOnCpu(cls, options, groups)
        elsewhere = None if on_cpu is None or where == "host" else (on_cpu.shown, cpu)
        tried = self.tried = Tried(cls, options, groups, masters, cpu if where == "host" else device, elsewhere)
        self.on_host = tried if where == "host" else Tried(cls, options, groups, masters, cpu)
        self.way = tried.way()
        self.common = Common(cls.__name__, groups, self.way)
        self.inner = Inner(cls, options, self.common, self.way, tried.stand_ins)
        self._on_cpu = on_cpu if _keeps_nothing_common(self.way) else None
        self._blocks_common, within = self.common, self.inner
        if self._on_cpu is not None:
            way = self.on_host.way()
            self._blocks_common = Common(cls.__name__, self._on_cpu, way)
            within = Inner(cls, options, self._blocks_common, way, self.on_host.stand_ins)
        elif where == "mixed":
            raise InputError(
                f"where='mixed' was asked for, but {cls.__name__} keeps something that is common to all tensors, so "
                "that all must be updated in one place; use where='host' or where='device'"
            )
        self.late = go_on and self._on_cpu is not None and not self._eager and not self.way.writes_gradients
        self.on_device: frozenset[int] | None = None
        there = Rule(within, groups if self._on_cpu is None else self._on_cpu, masters)
        self.rule = there if where != "mixed" else Rule(self.inner, groups, masters, there)
        self._rule_on_host = there

    @property
    def updater(self) -> Updater:
        """How blocks are updated."""
        late = self.rule.are_alone if self.late else None
        hosted = self.is_hosted if self._where != "device" else None
        return Updater(self.rule.run, self._eager, hosted, self._run_on_host, late)

    def _run_on_host(self, work: Sequence[PartUpdate]) -> None:
        if self.on_device is None:  # before any plan
            self.on_device = frozenset()
        self._rule_on_host.run(work)

    def is_hosted(self, block: int) -> bool:
        """Whether a block is updated in RAM below a GPU."""
        return self._where == "host" or (self._where == "mixed" and block not in (self.on_device or ()))

    def begin(self) -> None:
        """A step begins, when none is under way. Raises GradientError where a backward has taken part of it with other
        groups."""
        if self._eager:
            self.common.check_unchanged()
            self._blocks_common.check_unchanged()
        elif self._on_cpu is not None:
            self._on_cpu.hold()

    def drop(self) -> None:
        """What steps have in common is forgotten; where updates go on that use it, when they have ended."""
        self.common.drop()
        if not self.late:
            self._drop_blocks()

    def let_go(self) -> None:
        """No update goes on any more."""
        if self.late:
            self._drop_blocks()
            self.rule.updated = False  # not by a backward

    def saved(self) -> dict[str, Any]:
        """What a state dict is to have beside state and groups."""
        return self.common.saved() | ({} if self._where == "device" else {_WHERE: self._where})

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take that over. Warns where blocks were updated elsewhere: their updates go on with other bits."""
        was, now = state_dict.get(_WHERE, "device"), self._where
        if was != now:
            warnings.warn(
                f"this optimizer's state was made with where={was!r} and goes on with where={now!r}: updates of blocks "
                f"may have other bits from here on; for the same run, make the optimizer with where={was!r}",
                stacklevel=4,
            )
        self.common.load(state_dict)

    def _drop_blocks(self) -> None:
        self._blocks_common.drop()
        if self._on_cpu is not None:
            self._on_cpu.let_go()


_WHERE = "where"


def _keeps_nothing_common(way: Way) -> bool:
    """Whether tensors could as well have an optimizer each."""
    return not (way.all_groups or way.counts or way.in_place)
