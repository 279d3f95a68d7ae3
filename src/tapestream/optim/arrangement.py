"""`Arrangement`: which place the optimizer's state of each block has, and how it gets another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier
from tapestream.optim.handle import Handle
from tapestream.optim.parts import Member, part_limits, passed_nbytes, shard_parts, state_parts
from tapestream.optim.refusals import made_by_hand
from tapestream.optim.rule import Rule
from tapestream.optim.showing import Showing
from tapestream.optim.state import StateShape
from tapestream.optim.tried import Group, Tried
from tapestream.storage.blocks import ParameterBlock, StatePart


class Arrangement:
    """The parts of every block's state. Making it drops what an earlier optimizer has left.

    A parameter has a place for its state from when it first takes gradients, or has one, and keeps it when it is frozen
    later. ``groups()`` gives the param_groups as they are now. ``hosted``: the state stays in RAM, and need not be cut.
    """

    def __init__(
        self, handle: Handle, rule: Rule, tried: Tried, groups: Callable[[], Sequence[Group]], *, hosted: bool = False
    ) -> None:
        self._hosted = hosted
        self._handle, self._rule, self._tried, self._groups = handle, rule, tried, groups
        self._trained: set[int] = set()  # ids of those that have a place
        self._members: list[list[Member]] = []
        self._limit: int | None = None
        self._finer: list[int] = []  # limits that are tried where a plan needs less
        self._lay_out()
        self.showing = Showing(handle.store, rule.scalars)

    @property
    def beside_nbytes(self) -> int:
        """Bytes of state that cannot be moved: lists of tensors, say."""
        return sum(one.state.beside_nbytes for block in self._members for one in block)

    def cut_finer(self) -> bool:
        """Cut the state into smaller parts; returns whether there was anything to cut."""
        if not self._finer:
            return False
        self._limit = self._finer.pop()
        return self._arrange(self._cut(self._limit))

    def is_behind(self) -> bool:
        """Whether a parameter of a group takes gradients and has no place for its state yet."""
        return any(map(_takes_gradients, self._without_places()))

    def check_no_gradients(self) -> None:
        """Raise GradientError where there are gradients beside those that updates within a backward have used up."""
        mine, pinned = self._mine(), self._handle.store.updates.pinned
        for block in (one for one in self._handle.store.blocks if one.index not in pinned):
            for p in block.parameters:
                if p.grad is not None and id(p) in mine and not isinstance(p.grad, SteppedGradient):
                    raise made_by_hand(tuple(p.shape), block.index)

    def cannot_step(self) -> bool:
        """Whether an update would make state that has no place."""
        return any(p.grad is not None for p in self._without_places())

    def _without_places(self) -> Iterator[torch.Tensor]:
        mine = self._mine()
        parameters = (p for block in self._handle.store.blocks for p in block.parameters)
        return (p for p in parameters if id(p) in mine and id(p) not in self._trained)

    def follow(self) -> bool:
        """Give such parameters one; what the others have stays. Returns whether there were any."""
        if not self.is_behind():
            return False
        self._note_members()
        limits = self._limits()
        finest = bool(limits) and not self._finer
        self._limit = limits[-1 if finest else 0] if limits else None
        self._finer = [] if finest else list(limits[1:])
        self._arrange(self._cut(self._limit))
        return True

    def _arrange(self, cut: Sequence[tuple[StatePart, ...]]) -> bool:
        """Move the state to other parts; returns whether there are any."""
        store = self._handle.store
        if all(block.state_parts == parts for block, parts in zip(store.blocks, cut, strict=True)):
            return False
        store.settle()
        store.place(frozenset())
        for block, parts in zip(store.blocks, cut, strict=True):
            saved = self.showing.saved(block)
            store.drop(Kind.OPTIMIZER_STATE, block.index)
            block.state_parts = parts
            self.showing.follow(block)
            for parameter, found in saved.items():
                # A parameter that had no place has its state among what is not streamed.
                rest = self.showing.written(parameter, {**self._rule.scalars[id(parameter)], **found})
                self._rule.restored(parameter, rest, self.showing.pieces_of(parameter))
        return True

    def _lay_out(self) -> None:
        store, given = self._handle.store, self._handle.given
        self._note_members()
        limits = self._limits()
        cuts = [self._cut(limit) for limit in limits or (None,)]
        known = None if given is None else [cost.state_parts for cost in given.profile.blocks]
        sizes = [[tuple(part.nbytes for part in parts) for parts in cut] for cut in cuts[1:]]
        chosen = 1 if known is not None and known in sizes else 0
        self._limit = limits[chosen] if limits else None
        self._finer = [] if chosen else list(limits[1:])
        store.settle()  # not before: until here the one that this one replaces may still be needed
        store.place(frozenset())
        store.drop(Kind.OPTIMIZER_STATE)
        for block, parts in zip(store.blocks, cuts[chosen], strict=True):
            block.state_parts = parts

    def _limits(self) -> tuple[int, ...]:
        # What never moves needs no parts; a plan that was given knows those that it was made with.
        store, given = self._handle.store, self._handle.given
        largest = max((sum(one.nbytes for one in block) for block in self._members), default=0)
        budget = (self._handle.budget if given is None else given.budget).device_nbytes
        if store.home is store.copies.near or self._hosted:
            return part_limits(None, largest)
        return part_limits(budget, largest, self._passed_nbytes(budget))

    def _passed_nbytes(self, budget: int | None) -> int | None:
        """The host's bytes where state passes it on its way to and from the disk."""
        store, homes = self._handle.store, self._handle.homes
        host = homes.limited(self._handle.budget).host_nbytes
        if store.homes[Kind.OPTIMIZER_STATE] is Tier.DISK:
            return None if store.copies.direct else host
        if Kind.OPTIMIZER_STATE not in store.homes.overflowing:
            return None
        gradients = self._handle.update == "step"
        lives = sum(one.nbytes for block in self._members for one in block)
        lives += sum(block.parameters_nbytes * (1 + (gradients and block.trainable)) for block in store.blocks)
        return passed_nbytes(lives, budget, host)

    def _note_members(self) -> None:
        blocks, mine = self._handle.store.blocks, self._mine()
        trained = (p for block in blocks for p in block.parameters if _takes_gradients(p) and id(p) in mine)
        self._trained |= set(map(id, trained))
        self._members = [
            [self._member(i, p) for i, p in enumerate(block.parameters) if id(p) in mine] for block in blocks
        ]

    def _member(self, number: int, parameter: torch.Tensor) -> Member:
        shape, dtype = tuple(parameter.shape), self._tried.target_dtype(parameter)
        if id(parameter) not in self._trained:
            return Member(number, shape, StateShape(()), 0)
        nbytes = parameter.numel() * dtype.itemsize
        temporary = 0 if self._tried.group_of(parameter).get("fused") else nbytes  # fused rules make none
        return Member(
            number, shape, self._tried.shape(parameter), temporary, nbytes if dtype is not parameter.dtype else 0
        )

    def _cut(self, limit: int | None) -> list[tuple[StatePart, ...]]:
        """The parts of every block for a limit of their bytes."""
        cut = []
        for block, members in zip(self._handle.store.blocks, self._members, strict=True):
            if block.share.ranks > 1:
                self._check_elementwise(block, members)
                cut.append(shard_parts(block, members, limit, together=self._together))
                continue
            large = [one for one in members if limit is not None and one.nbytes > limit]
            divisible = {one.number for one in large if self._tried.may_be_cut(block.parameters[one.number])}
            members = [replace(one, divisible=one.number in divisible) for one in members]
            cut.append(state_parts(members, limit, together=self._together))
        return cut

    def _check_elementwise(self, block: ParameterBlock, members: Sequence[Member]) -> None:
        whole = [one for one in members if not self._tried.may_be_cut(block.parameters[one.number])]
        if whole:
            raise InputError(
                f"this optimizer looks at tensors of {list(whole[0].shape)} as wholes, but with peers=ts.Peers("
                "shard=True) each rank updates a part of them; use one that treats every number by itself (AdamW, SGD, "
                "Adagrad, Lion), or ts.Peers() with a copy on each rank"
            )

    @property
    def _together(self) -> bool:
        """Whether the rule makes temporaries of all tensors at once: its foreach form does, the default on a GPU."""
        default = self._handle.store.device.type != "cpu" and not self._hosted
        asked: list[Any] = [g.get("foreach") for g in self._groups() if not g.get("fused")]
        return any(default if foreach is None else foreach for foreach in asked)

    def _mine(self) -> set[int]:
        return {id(p) for group in self._groups() for p in group["params"]}


def _takes_gradients(parameter: torch.Tensor) -> bool:
    """What is frozen may have a gradient all the same, from before or by hand; torch optimizers use it."""
    return parameter.requires_grad or parameter.grad is not None
