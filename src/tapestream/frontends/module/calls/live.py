"""Calls of a streamed model that are under way, and the store as one of their chains sees it."""

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from tapestream.errors import BudgetError, GradientError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.gradients import Sums
from tapestream.executor.stepped import SteppedGradient
from tapestream.frontends.giving_way import Awaiting
from tapestream.frontends.module.allocator import AllocatorWatch
from tapestream.frontends.module.calls.refusals import Refusals
from tapestream.frontends.module.calls.second_order import SecondOrder
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.planning.exceeded import limit_of
from tapestream.runner.graph import let_go_of_failed_backward
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.calls.call import StreamCall


DIFFERENTIATED_TWICE = (
    "this call was differentiated a second time, but its tape is gone after one backward (retain_graph=True is not "
    "supported); run the forward again"
)
UPDATED_IN_BETWEEN = (
    "a second forward began before this backward, which with update='backward' changes the weights that the second "
    "forward has used; call backward() before the next forward, or use update='step'"
)
CUT_SHORT = (
    "a backward has differentiated blocks of a streamed model, and code that runs in its midst (the backward of an "
    "autograd.Function between blocks) calls this model or its blocks, which would take the place of blocks that this "
    "backward needs; put all blocks into that Function or none, call them in the model's forward without it, as "
    "streaming recomputes anyway, or allow enough for home='device' to keep everything"
)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call that a backward has reached: whether it is plain, its casts, and the parameter blocks that it uses."""

    plain: bool
    casts: object | None
    blocks: frozenset[int]


@dataclass(slots=True, eq=False)
class Live:
    """Calls of one model that still await their backward, and the one whose backward is under way.

    ``gave_way``: those to which no backward may come any more, of whose graph the user still holds something;
    ``awaiting``: those that can give way; ``refused``: what did not fit, beside what. ``task``: the last backward;
    ``several``: whether it began with several calls alive; ``begun``: by id, those that it has reached; ``before``:
    whether blocks had gradients when it began.
    ``allocator``: is told when calls begin and end. ``alone``: the budget is for one call at a time. ``left``: the
    model is not streamed any more, its parameters lie elsewhere. ``allowed``: gives the bytes of the device's budget;
    ``second``: of the last backward, where its own graph is wanted.
    """

    allocator: AllocatorWatch
    allowed: Callable[[], int | None]
    alone: bool = True
    calls: "weakref.WeakSet[StreamCall]" = field(default_factory=weakref.WeakSet)
    gave_way: "weakref.WeakSet[StreamCall]" = field(default_factory=weakref.WeakSet)
    awaiting: Awaiting = field(default_factory=Awaiting)
    refused: Refusals = field(default_factory=Refusals)
    differentiated: "StreamCall | None" = None
    busy: bool = False
    task: int = -1
    several: bool = False
    begun: "dict[int, _Begun]" = field(default_factory=dict)
    before: bool = False
    left: bool = False
    second: SecondOrder | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Inside, calls that end do not disturb the store. What a backward that ended in somebody else's exception
        has left ends first, and so does one in whose midst they begin: what it would still need is refused then."""
        if (before := self.differentiated) is not None and not self.busy:
            if torch._C._current_graph_task_id() == self.task:
                before.cut_short = True
                before.finish()
            else:
                before.abort()
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy

    def wait(self, call: "StreamCall") -> None:
        """``call`` is alive. Where its graph is plain PyTorch's, what it holds is the user's."""
        self.calls.add(call)
        if not call.plain:
            self.awaiting.begins(call)

    def end(self, call: "StreamCall") -> None:
        """It is not any more."""
        self.calls.discard(call)
        self.awaiting.ends(call)

    def make_way(self, prepared: Prepared | None) -> None:
        """Another forward begins: calls give way whose backward would change the weights that it uses."""
        self._look_for_failed()
        if prepared is not None and prepared.update == "backward":
            for call in self.awaiting.all():
                call.give_way(partial(GradientError, UPDATED_IN_BETWEEN))

    @property
    def left_nbytes(self) -> int:
        """Most bytes that the user's graphs of calls that gave way hold."""
        return sum(call.prepared.left_nbytes for call in self.gave_way)

    def _look_for_failed(self) -> None:
        """Calls of which a backward has failed outside of them are not awaited, if nobody else holds them."""
        if self.calls:
            let_go_of_failed_backward()

    def begins(self, call: "StreamCall", cotangents: Sequence[torch.Tensor | None] = ()) -> None:
        """A backward reaches ``call``, with ``cotangents`` where its graph is plain PyTorch's.

        Raise GradientError where gradients of several calls would be added in another way than in plain PyTorch: in
        another order, where autograd adds up those of some calls and the store those of others, and more than two parts
        come together; or in another dtype, where the calls share an ``autocast``.
        """
        if self.left:
            raise GradientError(
                "unstream() was called between this call of the model and its backward, which needs the streamed "
                "parameters; run backward first"
            )
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task, self.several, self.begun = task, len(self.calls) > 1, {}
            self.allocator.begins()
            allowed, wanted = self.allowed(), call.plain and torch.is_grad_enabled()
            self.second = SecondOrder(call, allowed) if wanted and allowed is not None else None
            parameters = (p for block in call.store.blocks for p in block.parameters)
            self.before = self.several and any(p.grad is not None for p in parameters)
            self._check_gave_way(call, allowed)
        if self.second is not None:
            self.second.arrive(cotangents)
        if not self.several:
            return
        mine = _Begun(call.plain, call.casts, call.prepared.used)
        others = [one for key, one in self.begun.items() if key != id(call) and one.blocks & mine.blocks]
        if call.casts is not None and any(call.casts is one.casts for one in others):
            raise GradientError(
                "this backward differentiates two calls of one model that were made within one autocast: plain PyTorch "
                "casts the weights once for both and adds their gradients in 16 bits, a streamed model in 32; give "
                "each call an autocast of its own (or cache_enabled=False), call backward() for each, or give "
                "both batches to one call"
            )
        self.begun[id(call)] = mine
        if len({one.plain for one in (mine, *others)}) > 1 and 1 + len(others) + self.before > 2:
            raise GradientError(
                f"this backward differentiates {1 + len(others)} calls of one model or "
                f"more{', beside gradients of an earlier one' if self.before else ''}; the budget stores some of them "
                "and recomputes others, so their gradients would be added in another order than in plain PyTorch: give "
                "all batches to one call, call backward() for each loss, allow more, so that all of them are stored, "
                "or say how many await their backward at once: Budget(..., calls=)"
            )

    def _check_gave_way(self, call: "StreamCall", allowed: int | None) -> None:
        """The first look of a backward, before any block runs. Those that it needs have raised nothing yet, and the
        others were to be gone by now."""
        for other in self.gave_way:
            if other.given_up is not None and other.is_used():
                raise other.given_up()
        others = sum(one.prepared.held_nbytes for one in self.calls)
        left, needed = self.left_nbytes, call.prepared.shared_nbytes + others + self.left_nbytes
        if left and allowed is not None and needed > limit_of(allowed):
            raise BudgetError(
                f"a budget of {format_nbytes(allowed)} was asked for; the result of a call whose backward never ran "
                f"is still held, with up to {format_nbytes(left)} of its graph. Before this backward, drop it "
                f"(del loss, or detach() what is to stay), or allow {needed} bytes",
                least_nbytes=needed,
            )


class SegmentView:
    """The store as one segment's interpreter sees it: stages numbered within the segment.

    ``borrowed``: blocks that another segment's plan owns; they come for each run and go after it, and what is added up
    for them is left to that other. ``unread``: stages whose backward needs no parameters. ``seeds``: sums for the
    stage at hand that its backward does not start from but is added to.
    """

    def __init__(
        self, store: BlockStore, uses: list[int | None], borrowed: Container[int] = (), unread: Container[int] = ()
    ) -> None:
        self._store, self._uses, self._borrowed, self._unread = store, uses, borrowed, unread
        self.divided = store.copies.shards is not None
        self.wanted = True  # whether the backward at hand asks for gradients of parameters
        self.seeds: Sums = {}
        self._running: int | None = None
        self._brought = False
        self._last_use = {b: k for k, b in reversed(list(enumerate(uses))) if b is not None}
        self.start, self.wait, self.free = store.start, store.wait, store.free
        self.update, self.has_gradient = store.update, store.has_gradient

    def compute_begins(self, stage: int, *, backward: bool = False) -> None:
        block = self._running = None if backward and stage in self._unread else self._uses[stage]
        there = block is None or self._store.copies.on_device(block)
        self._store.compute_begins(block)
        self._brought = block in self._borrowed and not there

    def compute_ended(self, stage: int) -> None:
        block = self._running
        self._store.compute_ended(block)
        if self._brought and block is not None:
            self._store.give_back(block)
            self._brought = False

    def forward_ended(self) -> None:
        """The turn begins, which nobody calls a stage: released regions must not linger beside it either."""
        self._store.compute_begins(None)

    def backward_ended(self, stage: int, sums: Sums) -> None:
        block = self._uses[stage]
        for key, (parameter, seed) in self.seeds.items():
            made = sums.get(key)
            sums[key] = parameter, seed if made is None else _added(made[1], seed)
        self.seeds = {}
        if not self.wanted:
            sums.clear()
        elif block is not None and self._last_use[block] == stage:
            if block in self._borrowed:
                self._store.gradients.take(block, sums)
            else:
                self._store.take_gradients(block, sums)


def check_no_gradients(store: BlockStore, pinned: Container[int]) -> None:
    """A block's update within backward sees what this backward makes, and nothing that was there before."""
    for block in (one for one in store.blocks if one.index not in pinned):
        for p in block.parameters:
            if p.grad is not None and not isinstance(p.grad, SteppedGradient):
                raise GradientError(
                    f"a parameter of shape {tuple(p.shape)} in block {block.index} has a gradient from before this "
                    "backward, which its update within backward would leave out; call zero_grad() first, or use "
                    "update='step'"
                )


def _added(gradient: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """The sum that autograd makes of a seed and the one gradient that follows. A matrix product is nobody else's."""
    return gradient.add_(seed) if gradient.dim() > 1 else seed + gradient
