"""`Updates`: the optimizer's rule on parameter blocks, part by part of their state."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import increment_version

from tapestream.executor import updating
from tapestream.executor.block_regions import users_of
from tapestream.executor.copies import BlockCopies
from tapestream.executor.gradients import Found, GradientBook
from tapestream.executor.interruptions import interruptions_after
from tapestream.executor.loans import Loans
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.storage.blocks import ParameterBlock, Piece, StatePart
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region


@dataclass(frozen=True, slots=True)
class PartUpdate:
    """What one update works on: the block, the part and what it covers, gradients by parameter number.

    ``views()``: the state in the order of the part's slots. State that no update has written takes no memory before.
    ``shard``: the bytes of the parameters' shard, where blocks are divided among ranks, and gradients are the shard's.
    ``weights``: the bytes of the parameters, where an update is of another copy than they show.
    """

    block: ParameterBlock
    part: StatePart | None
    gradients: Found
    views: Callable[[], Sequence[torch.Tensor]]
    shard: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    def tensors(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """What is updated of a parameter that has a gradient, and the gradient of that. Another tensor over the same
        bytes: the parameter's own ``.grad``, which may lie on another device, is left alone."""
        block, gradient = self.block, self.gradients[piece.number]
        stride = block.strides[piece.number]
        if self.weights is not None:
            return block.piece_in(self.weights, piece), piece.of(gradient, stride)
        if self.shard is None:
            return piece.of(block.parameters[piece.number].detach(), stride), piece.of(gradient, stride)
        own = block.piece_in(self.shard, piece)
        first, _ = block.own_elements()[piece.number]
        given = gradient[piece.start - first : piece.stop - first]
        return own, given.as_strided(own.shape, own.stride()) if piece.whole else given


@dataclass(frozen=True, slots=True)
class Updater:
    """How blocks are updated: ``run`` applies the optimizer's rule in place.

    ``eager``: within the backward (``update="backward"``), so that no gradient is ever kept. ``hosted``: whether a
    block is updated in RAM below the device if it is no plain tensors on it (None: none is), where ``run_on_host``
    applies the rule; ``late``: whether updates there of some parameters may go on under what the user does after a step
    (None: of none).
    """

    run: Callable[[Sequence[PartUpdate]], None]
    eager: bool
    hosted: Callable[[int], bool] | None = None
    run_on_host: Callable[[Sequence[PartUpdate]], None] | None = None
    late: Callable[[Sequence[torch.Tensor]], bool] | None = None


class Updates:
    """Runs updates. ``done``: blocks all of whose parts were updated since this was last cleared."""

    def __init__(self, pool: Pool, copies: BlockCopies, gradients: GradientBook, loans: Loans) -> None:
        self._pool, self._copies, self._gradients, self._loans = pool, copies, gradients, loans
        self._on_device = copies.home_of(Value(Kind.PARAMETERS, 0)) is copies.near
        self.updater: Updater | None = None
        self.done: set[int] = set()
        self.pinned: frozenset[int] = frozenset()  # blocks that are plain tensors on the device
        self.on_host = copies.on_host
        self._stepping = False  # whether the step phase of a plan is being run
        self._under_way: dict[int, tuple[int, Found]] = {}  # the part that is next, and the gradients
        self._views: dict[Value, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # where home is the device

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside, the step phase of a plan is being run."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    @property
    def eager(self) -> bool:
        """Whether blocks are updated within the backward."""
        return self.updater is not None and self.updater.eager

    def is_hosted(self, block: int) -> bool:
        """Whether the block is updated in RAM below the device."""
        hosted = None if self.updater is None else self.updater.hosted
        return hosted is not None and block not in self.pinned and hosted(block)

    def has_gradient(self, block: int) -> bool:
        """Whether a backward has left a gradient for the block that no update has used up."""
        at_home = self.is_hosted(block) and self._gradients.is_home(block)
        return at_home or self._gradients.has_any(block) or self.has_begun(block)

    def has_begun(self, block: int) -> bool:
        """Whether some parts of the block were updated and others are still to be."""
        return block in self._under_way

    def run(self, parts: Iterable[tuple[int, int]]) -> None:
        """Apply the rule to (block, part) pairs whose values are on the device; nothing where there is no gradient."""
        assert self.updater is not None
        work: list[PartUpdate] = []
        found = [(block, part, gradients) for block, part in parts if (gradients := self._take(block, part))]
        for block, part, gradients in found:
            this = self._copies.blocks[block]
            what = this.state_parts[part] if this.state_parts else None
            work.append(PartUpdate(this, what, gradients, partial(self._state, block, part), self._shard(block)))
        if not work:
            return
        self._pool.trim()  # released regions must not linger beside the rule's temporaries
        try:
            self._copies.engine.compute_begins(self._used(found))
            self.updater.run(work)
            self._copies.engine.compute_ended(self._used(found))
        except BaseException:
            for one in work:  # their gradients are gone
                self._under_way.pop(one.block.index, None)
            raise
        for block, part, gradients in found:
            if self._copies.shards is not None:  # which the rule has not seen as tensors of their own
                increment_version([self._copies.blocks[block].parameters[i] for i in gradients])
            if not self._on_device:
                state = Value(Kind.OPTIMIZER_STATE, block, part)
                there = (
                    {state} if self._copies.has(state, self._copies.near) else set()
                )  # not if none of it has a gradient
                self._copies.dirty |= {Value(Kind.PARAMETERS, block), *there}
            if self.eager and block not in self._under_way and block not in self.pinned:
                self._gradients.stepped(block, gradients)

    def run_on_host(self, block: int, part: int) -> None:
        """Begin an update in RAM of a block whose gradient has come there in this backward, or, in a step phase, has
        come before. (Late ones are begun by the step before, and nothing is left to do where a plan has them.)"""
        if not self.eager and not self._stepping:
            return
        if part == 0:
            self._under_way.pop(block, None)
            self._copies.adopt_replaced(Value(Kind.PARAMETERS, block))
            found = self._gradients.sent(block) if self.eager else self._gradients.at_step(block, Tier.HOST)
        else:
            _, found = self._under_way.pop(block, (part, {}))
        if not found:
            return
        last = part + 1 == self._copies.blocks[block].updates
        if not last:
            self._under_way[block] = part + 1, found
        self._begin_on_host(block, part, found)
        if last:
            self.done.add(block)
        if last and self.eager:
            self._gradients.stepped(block, found)

    def left_on_device(self, among: Collection[int] | None) -> list[int]:
        """Of blocks (of ``among``, None: of all) that have a gradient and were not updated by a plan: those that are to
        be updated on the device. The others' updates are begun."""
        blocks = (block for block in self._copies.blocks if among is None or block.index in among)
        waiting = (block for block in blocks if block.index not in self.done)
        left = [block.index for block in waiting if any(p.grad is not None for p in block.parameters)]
        self._step_on_host(block for block in left if self.is_hosted(block))
        return [block for block in left if not self.is_hosted(block)]

    def _step_on_host(self, blocks: Iterable[int]) -> None:
        """Begin the updates of a step in RAM, in order; they go on after it where nobody can see them half done."""
        assert self.updater is not None
        for block in blocks:
            this, copies = self._copies.blocks[block], self._copies
            copies.adopt_replaced(Value(Kind.PARAMETERS, block))
            given = {i: p.grad for i, p in enumerate(this.parameters) if p.grad is not None}
            alone = self._is_alone(block, list(given.values()))
            found = {i: gradient.detach().to("cpu") for i, gradient in given.items()}
            with interruptions_after():  # else it might go on where it can be seen
                for part in range(this.updates):
                    self._begin_on_host(block, part, found)
                self.done.add(block)
                if alone:
                    self.on_host.hide(block, [*(this.parameters[i] for i in this.trained), *given.values()])
                else:
                    copies.end_on_host(block)

    def _begin_on_host(self, block: int, part: int, found: Found) -> None:
        this = self._copies.blocks[block]
        assert self.updater is not None
        run = self.updater.run_on_host
        assert run is not None
        what = this.state_parts[part] if this.state_parts else None
        ready, memories = self._copies.on_the_host(block, part)
        state, empty = Value(Kind.OPTIMIZER_STATE, block, part), torch.empty(0, dtype=torch.uint8, device="cpu")
        views = list if what is None else partial(what.views, memories.get(state, empty))

        def update() -> None:
            ready()
            run([PartUpdate(this, what, found, views, weights=memories[Value(Kind.PARAMETERS, block)])])

        increment_version([this.parameters[i] for i in found])  # the rule has not seen them
        self.on_host.begin(block, update)

    def _is_alone(self, block: int, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether nobody has tensors over what an update reads and writes but those that can be made to wait."""
        copies, this, run = self._copies, self._copies.blocks[block], self.updater
        trained = [this.parameters[i] for i in this.trained]
        if run is None or run.late is None or not run.late(trained) or not updating.can_wait([*trained, *gradients]):
            return False
        if not self._gradients.lie_at_home(block, gradients):
            return False
        states = (Value(Kind.OPTIMIZER_STATE, block, part) for part in range(this.updates))
        bases = sum(gradient._base is not None for gradient in gradients)  # which go with them
        shown = {
            Value(Kind.PARAMETERS, block): len(this.trained),
            Value(Kind.GRADIENT, block): len(gradients) + bases,
        }
        held = {**dict.fromkeys(states, 0), **shown}
        regions = [(copies.regions.get((value, Tier.HOST)), count) for value, count in held.items()]
        return all(region is None or users_of(region.memory) <= count for region, count in regions) and all(
            copies.has(value, Tier.HOST) for value in shown
        )

    def finish(self) -> None:
        """Update what is left of blocks of which some parts were updated."""
        for block in list(self._under_way):
            self.now(block)

    def now(self, block: int) -> None:
        """All that a schedule does for the updates of a block, at once."""
        if self.is_hosted(block):
            if self._gradients.has_any(block):
                self._gradients.send_home(block)
            first = self._under_way[block][0] if block in self._under_way else 0
            for part in range(first, self._copies.blocks[block].updates):
                self.run_on_host(block, part)
            self._copies.end_on_host(block)
            return
        self._loans.bring_near(Value(Kind.PARAMETERS, block))
        first = self._under_way[block][0] if block in self._under_way else 0
        for part in range(first, self._copies.blocks[block].updates):
            state = Value(Kind.OPTIMIZER_STATE, block, part)
            brought = self._bring(state)
            self.run(((block, part),))
            if brought:
                self._send_home(state)

    def state_views(self, block: int, part: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """The optimizer's state in a part of a block over ``memory``; where that never moves the views are kept."""
        value = Value(Kind.OPTIMIZER_STATE, block, part)
        known = self._views.get(value)
        if known is not None and known[0] is memory:
            return known[1]
        views = self._copies.blocks[block].state_parts[part].views(memory)
        if self._on_device:
            self._views[value] = memory, views
        return views

    def forget(self) -> None:
        """The state of another optimizer will come."""
        self._views.clear()

    def _take(self, block: int, part: int) -> Found:
        """The gradients for one part: found for the first, kept for those that follow."""
        last = part + 1 == self._copies.blocks[block].updates
        if part == 0:
            self._under_way.pop(block, None)
            eager = self.eager and block not in self.pinned
            found = self._gradients.in_backward(block) if eager else self._gradients.at_step(block)
        else:
            due, found = self._under_way.pop(block, (part, {}))
            assert due == part, f"part {due} of block {block} was to be updated, not {part}"
        if found and not last:
            self._under_way[block] = part + 1, found
        if last:
            self.done.add(block)
        return found

    def _shard(self, block: int) -> torch.Tensor | None:
        copies, value = self._copies, Value(Kind.PARAMETERS, block)
        if copies.shards is None:
            return None
        copies.adopt_replaced(value)  # which the parameters show, and their shard does not
        return copies.region(value, copies.near).memory

    def _used(self, found: Iterable[tuple[int, int, Found]]) -> list[Region]:
        if self._on_device and self._copies.shards is None:
            return []  # nothing is copied from or to where it lives
        return [region for block, part, _ in found for region in self._copies.device_regions(block, part=part)]

    def _state(self, block: int, part: int) -> list[torch.Tensor]:
        copies, state = self._copies, Value(Kind.OPTIMIZER_STATE, block, part)
        this = copies.blocks[block]
        if not this.nbytes_of(state.kind, part):  # no state, or that of parameters without elements
            nothing = torch.empty(0, dtype=torch.uint8, device=copies.device)
            return this.state_parts[part].views(nothing) if this.state_parts else []
        made = copies.has(state, copies.near)
        if not made and copies.holds(state, copies.home_of(state)):  # a plan did not know of its home
            copies.copy_now(state, copies.home_of(state), copies.near)
            made = True
        region = copies.region(state, copies.near)
        if not made:
            copies.engine.compute_begins([region])
        return self.state_views(block, part, region.memory)

    def _bring(self, state: Value) -> bool:
        """Let a part of the state come, if it is not there and there is one; returns whether it is to go home again."""
        copies = self._copies
        for tier in (Tier.HOST, copies.near):
            copies.wait(state, tier)
        if copies.tier_of(state) is copies.near or copies.has(state, copies.near):
            return False
        if not copies.blocks[state.index].nbytes_of(state.kind, state.part):
            return False
        if copies.holds(state, copies.home_of(state)):
            copies.copy_now(state, copies.home_of(state), copies.near)
        else:
            copies.reserve(state, below=True)
        return True

    def _send_home(self, state: Value) -> None:
        copies = self._copies
        if state in copies.dirty:
            copies.copy_now(state, copies.near, copies.home_of(state))
        copies.release(state, copies.near)
