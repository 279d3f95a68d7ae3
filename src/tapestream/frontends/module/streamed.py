"""`Streamed`: the handle behind a streamed model; watches calls, keeps plans, owns the store."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from tapestream.accelerator.memory import workspaces_nbytes
from tapestream.costs import Budget, Machine
from tapestream.errors import InputError, StorageError
from tapestream.executor.blocks import Updater
from tapestream.executor.stepped import SteppedGradient
from tapestream.frontends.around import check_around, check_uncovered
from tapestream.frontends.module.accumulating.accumulation import Accumulation
from tapestream.frontends.module.accumulating.joint_call import JointCall
from tapestream.frontends.module.allocator import AllocatorWatch
from tapestream.frontends.module.blocks import parts_around
from tapestream.frontends.module.calls.again import Beginning, UnplannedBlock, cannot_begin_again
from tapestream.frontends.module.calls.call import StreamCall
from tapestream.frontends.module.calls.forward_only import ForwardOnly
from tapestream.frontends.module.calls.live import Live
from tapestream.frontends.module.calls.longest import Longest
from tapestream.frontends.module.calls.node import apply_block
from tapestream.frontends.module.calls.profiling import Timings, observe_call
from tapestream.frontends.module.calls.ready import make_ready
from tapestream.frontends.module.calls.refused import plan_call
from tapestream.frontends.module.calls.stepping import entering, run_step
from tapestream.frontends.module.homes.homes import Homes
from tapestream.frontends.module.homes.known import Known
from tapestream.frontends.module.homes.pinned import Pinned
from tapestream.frontends.module.homes.weights import Source
from tapestream.frontends.module.homes.wide import trains
from tapestream.frontends.module.observing.left_out import check_called_by_chance
from tapestream.frontends.module.observing.observe import Observation
from tapestream.frontends.module.one_plan import found_budget
from tapestream.frontends.module.plans.batch import batch_of
from tapestream.frontends.module.plans.prepare import Prepared, prepare, without_results
from tapestream.frontends.module.plans.terms import Update
from tapestream.frontends.module.ranks import Ranks, looks_of
from tapestream.frontends.module.swap import own_call
from tapestream.ir.actions import MEMORIES, Kind, Tier
from tapestream.ir.homes import HomeTiers
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.peers.peers import Peers
from tapestream.planning.cache import ByShape, key_of, shapes_of
from tapestream.planning.plan import Plan
from tapestream.planning.where import Where
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.stage import mode_of, modules_below
from tapestream.runner.state import take_apart

Original = Callable[..., Any]  # what a call did before the model was streamed


@dataclass(frozen=True, slots=True)
class Site:
    """What a swapped block knows: whose it is, and which."""

    handle: "Streamed"
    position: int


class Streamed:
    """One streamed model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        wide: Sequence[nn.Module],
        *,
        device: torch.device,
        budget: Budget,
        home: HomeTiers,
        folder: str | os.PathLike[str] | None,
        planner: str,
        knobs: dict[str, Any],
        plan: Plan | None,
        verify: bool,
        machine: Machine | None,
        engine: str,
        weights: Source | None,
        progress: Callable[[str, int, int], None] | None,
        longest: Longest,
        tables: Sequence[nn.Embedding] = (),
        peers: Peers | None = None,
        recomputes_work: bool = False,
    ) -> None:
        self.model, self.blocks, self.device = model, [*blocks, *wide], device
        self.wide = len(blocks)  # the position of the first of those that are not repeated
        self.parts = parts_around(model, self.blocks)
        agreement = None if peers is None else peers.joined(looks_of(model, self.blocks))
        self.budget = found_budget(budget, device, workspaces_nbytes(device), agreement)
        self.planner, self.knobs, self.given, self.verify = planner, knobs, plan, verify
        self.progress = progress or (lambda what, done, total: None)
        self.longest, self.recomputes_work = longest, recomputes_work  # between blocks
        self._machine, self.timed = machine, machine is None  # ``timed``: speeds are measured here
        self.homes = Homes(
            model, blocks, wide, device=device, budget=self.budget, home=home, folder=folder, engine=engine,
            weights=weights, progress=self.progress, tables=tables, agreement=agreement,
            among=1 if peers is None or agreement is None else peers.among(agreement.size))  # fmt: skip
        self.store, self.pool, self.engine = self.homes.store, self.homes.pool, self.homes.engine
        self.head: nn.Linear | None = None  # the one whose logits are made by chunks
        self.pinned = Pinned(self.store)
        self.update: Update = None
        self.where: Where = "device"
        self.optimizer: StreamedOptimizer | None = None
        self._known, self.ranks = Known(model), Ranks(model, self.store, peers, agreement, self.homes.shards)
        self._prepared: ByShape[Prepared] = ByShape()
        self._beside: dict[object, Prepared] = {}  # by what is beside and the id of one in ``_prepared``
        self.observation: Observation | None = None
        self.timings: Timings | None = None  # of earlier calls, if seconds are to be theirs
        self.call: StreamCall | None = None  # the one whose forward is under way
        self.joint: JointCall | None = None  # of all micro-batches, while its forwards are under way
        self._forward_only = ForwardOnly(self)
        self.last: Prepared | None = None
        self.passed: set[int] = set()  # positions of blocks that pass tensors with gradients on in objects
        self._bypass, self.accumulation = False, Accumulation()
        self.entered: nn.Module | None = None  # while a call is under way: what the user has called
        self._allocator = AllocatorWatch(self)
        self.exceeded = self._allocator.exceeded
        self._live = Live(self._allocator, lambda: self.budget.device_nbytes, alone=self.budget.calls == 1)

    # -- what the swapped classes call -------------------------------------------------------------------------------

    @property
    def called(self) -> nn.Module:
        """What the user has called: the model, a part of it that holds blocks, or one block."""
        return self.entered or self.model

    def call_model(self, called: nn.Module, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model, or of what is inside of it where no call is under way: ``called``."""
        if self._bypass or self.entered is not None:
            return original(*args, **kwargs)
        with self.homes.tables.watched(), entering(self, called):
            return self._enter(original, args, kwargs)

    def _enter(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_uncovered(f"a streamed {type(self.model).__name__}", "use a ts.Program inside the streamed blocks")
        with self._live.working():
            if self.optimizer is not None:
                self.optimizer.check_forward()
            if not torch.is_grad_enabled():
                self.pinned.bring()
                return self._forward_only.call_model(original, args, kwargs, beside=bool(self._live.calls))
            self._forward_only.end()
            check_around("a streamed model")
            self.ranks.check_alone()
            return self._call_live(original, args, kwargs)

    def _call_live(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._live.make_way(self.last)
        beginning = Beginning.take(modules_below(self.model), self.device)
        try:
            return self._run(beginning.modules, original, args, kwargs)
        except UnplannedBlock as unplanned:  # the profiled call dropped all layers of a container, or had another order
            beginning.restore(unplanned, args, kwargs)
            self.replan()
        try:
            return self._run(modules_below(self.model), original, args, kwargs)
        except UnplannedBlock as unplanned:
            raise cannot_begin_again(unplanned) from None

    def _run(
        self, modules: Sequence[nn.Module], original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.last is not None:
            self._allocator.look(self)
        planned = plan_call(self, partial(self._prepare, modules, original), args, kwargs)
        if planned is None:
            return original(*args, **kwargs)
        found, prepared = planned
        make_ready(self, prepared)
        outside = self.ranks.followed(chain(self.outside_parameters(), self.pinned.parameters()))
        self.call = call = StreamCall(self.store, found, prepared, self.device, self._live, self.homes.states, outside)
        try:
            if not call.plain:
                self.ranks.check_seen(prepared.resident, alone=len(self._live.calls) == 1)
            self._allocator.begins()
            with checkpointing_off(), call.followed():
                return call.watched(original(*args, **kwargs))
        except BaseException:
            call.abort()
            raise
        finally:
            self.call = None
            call.end_forward()

    def call_block(self, position: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's ``__call__``, within the model's."""
        block = self.store.uses[position]
        if self._bypass or block in self.pinned.blocks:
            return original(*args, **kwargs)
        if self.observation is not None:
            return self.observation.observe(position, original, args, kwargs)
        if self.joint is not None:
            return self.joint.wait_at_block(position, original, args, kwargs)
        if not torch.is_grad_enabled() and self.entered is not None:
            if block is None:
                return original(*args, **kwargs)
            return self._forward_only.call_block(block, original, args, kwargs)
        if self.call is None or self.call.closed:
            if self.entered is None:
                within = lambda *a, **k: self.call_block(position, original, a, k)  # noqa: E731
                return self.call_model(self.blocks[position], within, args, kwargs)
            if position >= self.wide and block is not None and not trains(self.blocks[position], args, kwargs):
                return self._forward_only.call_block(block, original, args, kwargs)  # nothing will be differentiated
            raise InputError(
                f"block {position} ({type(self.blocks[position]).__name__}) of a streamed model was called in a call "
                "that had no plan for it; keep what the model's forward calls the same from call to call"
            )
        if self.call.plain:
            return self.call.run_plain(position, original, args, kwargs)
        return apply_block(self.call, position, original, args, kwargs)

    # -- plans ------------------------------------------------------------------------------------------------------

    def machine(self) -> Machine:
        """Speeds of the links: given, or measured once."""
        if self._machine is None:
            self._machine = self.homes.measured()
        return self.ranks.machine(self._machine)

    def replan(self) -> None:
        """Forget all plans: the optimizer, or what is trainable, has changed."""
        self._prepared.clear()
        self._beside.clear()
        self.accumulation.clear()
        self._live.refused.clear()
        self._forward_only.forget()

    def prepare_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """The plans for a call with these arguments, without running it."""
        self._forward_only.end()
        with torch.enable_grad(), entering(self, self.model):
            found = self._prepare(modules_below(self.model), lambda *a, **k: own_call(self.model, a, k), args, kwargs)
        if found is None:
            raise InputError("this call dropped every block at random, so that there is nothing to plan; try again")
        return found

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside, the model runs as plain PyTorch with every block on the device."""
        self._bypass = True
        try:
            for block in self.store.blocks:
                self.store.lend(block.index)
            yield
        finally:
            self._bypass = False
            self.store.settle()

    def _prepare(
        self, modules: Sequence[nn.Module], original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Prepared | None:
        """Plans for this call, None where it drops every block at random."""
        if self.store.divide_thawed(live=bool(self._live.calls)):
            self.replan()
        state, _ = take_apart((args, dict(sorted(kwargs.items()))))
        kind, shapes = key_of(state, self._mode(modules), self.device), self.ranks.shapes(shapes_of(state))
        found, optimizer = self._prepared.find(kind, shapes), self.optimizer
        if optimizer is not None and (found is None or optimizer.behind):
            found = None if optimizer.follow(live=bool(self._live.calls)) else found
        if found is None:
            self.longest.plan(self, args, kwargs)  # before anything is run; its plan may serve this call
            found = self._prepared.find(kind, shapes)
        if found is None:
            anew = partial(self._prepare_anew, original, args, kwargs)
            found = self._live.refused.once((kind, shapes, self.budget), anew)
            if found is None:
                return None
            found = replace(found, batch=batch_of(state.tensors))
            self._prepared.add(kind, shapes, found)
        return without_results(self, found, self._beside)

    def _prepare_anew(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared | None:
        observed = observe_call(self, original, args, kwargs)
        if observed.segments:
            return prepare(self, observed)
        if self.called is self.model:
            some = lambda: bool(observe_call(self, original, args, kwargs).segments)  # noqa: E731
            check_called_by_chance(self.model, self.device, some)
        return None

    def begin_measuring(self) -> None:
        """Measure the links where speeds are wanted."""
        self.homes.begin_measuring(wanted=self._machine is None)

    def _mode(self, modules: Sequence[nn.Module]) -> object:
        mode = mode_of(modules)
        self._known.check(mode.identities)
        return mode, self.update, id(self.called), self.accumulation.parts

    def state_nbytes(self, parameter: nn.Parameter) -> int:
        """Bytes of optimizer state of a parameter outside the blocks."""
        return 0 if self.optimizer is None else self.optimizer.state_nbytes(parameter)

    def check_idle(self, what: str) -> None:
        """Raise InputError between a forward and its backward."""
        with self._live.working():
            self._forward_only.settle()
        if self._live.calls:
            raise InputError(f"{what} was called between a forward and its backward; call it before the forward")

    def attach(self, optimizer: StreamedOptimizer, updater: Updater) -> None:
        """Plan for this optimizer from now on."""
        self.store.settle()
        self.store.place(frozenset())
        self.store.drop(Kind.OPTIMIZER_STATE)
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, SteppedGradient):
                parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.optimizer, self.store.updates.updater = optimizer, updater
        self.update, self.where = optimizer.update, optimizer.where
        self.replan()

    def cut_finer(self) -> bool:
        """Let updates need less memory, where no call is under way; returns whether they do now."""
        if self.optimizer is None or self._live.calls or not self.optimizer.cut_finer():
            return False
        self.replan()
        return True

    def run_step(self, *, anew: bool) -> None:
        """See `run_step`."""
        run_step(self, anew=anew)

    def outside_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that belong to no block and are no tables: they stay on the device."""
        inside = {id(p) for block in self.store.blocks for p in block.parameters}
        inside |= set(map(id, self.homes.tables.parameters))
        yield from (p for p in self.model.parameters() if id(p) not in inside)

    def home_nbytes(self) -> dict[Tier, int]:
        """Bytes held in each tier now."""
        return {tier: self.pool.held_nbytes(tier) for tier in MEMORIES}

    def close(self) -> None:
        """Bring everything back into memory of its own and remove the files."""
        with self._live.working(), contextlib.suppress(StorageError, InputError):
            self.store.settle()  # what can be read, be it from a removed file or the user's own, is taken all the same
        self.homes.close()
