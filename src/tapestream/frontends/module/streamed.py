"""`Streamed`: the handle behind a streamed model; watches calls, keeps plans, owns the store."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapestream.accelerator.memory import workspaces_nbytes
from tapestream.costs import Budget, Machine
from tapestream.errors import InputError, StorageError
from tapestream.executor.blocks import Updater
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.stepped import SteppedGradient
from tapestream.frontends.around import check_no_hooks, check_no_program
from tapestream.frontends.available import free_nbytes
from tapestream.frontends.module.allocator import AllocatorWatch
from tapestream.frontends.module.calls.again import Beginning, cannot_begin_again
from tapestream.frontends.module.calls.beside import beside_live
from tapestream.frontends.module.calls.call import StreamCall, UnplannedBlock
from tapestream.frontends.module.calls.forward_only import ForwardOnly
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.calls.live import Live, SegmentView
from tapestream.frontends.module.calls.node import apply_block
from tapestream.frontends.module.homes.homes import Homes
from tapestream.frontends.module.homes.known import Known
from tapestream.frontends.module.homes.pinned import Pinned
from tapestream.frontends.module.homes.weights import Source
from tapestream.frontends.module.homes.wide import trains
from tapestream.frontends.module.observing.left_out import check_called_by_chance
from tapestream.frontends.module.observing.observe import Observation, Observed, StaysPut
from tapestream.frontends.module.plans.prepare import Prepared, prepare, without_results
from tapestream.frontends.module.plans.terms import Update
from tapestream.frontends.module.swap import class_of
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import HomeTiers
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.planning.cache import ByShape, key_of, shapes_of
from tapestream.planning.plan import Plan
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.private import copies_of
from tapestream.runner.runner import Runner
from tapestream.runner.stage import mode_of, modules_below
from tapestream.runner.state import take_apart


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
    ) -> None:
        self.model, self.blocks, self.device = model, [*blocks, *wide], device
        self.wide = len(blocks)  # the position of the first of those that are not repeated
        self.budget = budget
        if budget.device_nbytes is None:
            there = workspaces_nbytes(device)  # counted in plans, and free no more
            self.budget = budget.with_device(free_nbytes(device) + there)
        self.planner, self.knobs, self.given, self.verify = planner, knobs, plan, verify
        self.progress = progress or (lambda what, done, total: None)
        self._machine, self.timed = machine, machine is None  # ``timed``: speeds are measured here
        self.homes = Homes(
            model, blocks, wide, device=device, budget=self.budget, home=home, folder=folder, engine=engine,
            weights=weights, progress=self.progress
        )  # fmt: skip
        self.store, self.pool, self.engine = self.homes.store, self.homes.pool, self.homes.engine
        self.head: nn.Linear | None = None  # the one whose logits are made by chunks
        self.pinned = Pinned(self.store)
        self.update: Update = None
        self.optimizer: StreamedOptimizer | None = None
        self._known = Known(model)
        self._prepared: ByShape[Prepared] = ByShape()
        self._beside: dict[object, Prepared] = {}  # by what is beside and the id of one in ``_prepared``
        self._observation: Observation | None = None
        self.call: StreamCall | None = None  # the one whose forward is under way
        self._forward_only = ForwardOnly(self)
        self.last: Prepared | None = None
        self._bypass = False
        self._allocator = AllocatorWatch(self)
        self._live = Live(self._allocator, alone=self.budget.calls == 1)

    # -- what the swapped classes call -------------------------------------------------------------------------------

    def call_model(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own ``__call__``."""
        if self._bypass:
            return original(*args, **kwargs)
        check_no_program(f"streamed {type(self.model).__name__}", "use the Program inside the streamed blocks")
        with self._live.working():
            if self.optimizer is not None:
                self.optimizer.check_forward()
            if not torch.is_grad_enabled():
                self.pinned.bring()
                return self._forward_only.call_model(original, args, kwargs, beside=bool(self._live.calls))
            self._forward_only.end()
            check_no_hooks("a streamed model")
            return self._call_live(original, args, kwargs)

    def _call_live(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._live.check_none("a second forward began", self.last)
        beginning = Beginning.take(self.model, self.device)
        try:
            return self._run(original, args, kwargs)
        except UnplannedBlock as unplanned:  # the profiled call dropped all layers of a container, or had another order
            beginning.restore(unplanned, args, kwargs)
            self.replan()
        try:
            return self._run(original, args, kwargs)
        except UnplannedBlock as unplanned:
            raise cannot_begin_again(unplanned) from None

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._prepare(original, args, kwargs)
        if found is None:
            return original(*args, **kwargs)
        if self.last is not None:
            self._allocator.look(self)
        prepared = beside_live(self, self._live.calls, found, gathering(self, found, self._beside), self._beside)
        self.store.settle()
        self.store.place(prepared.resident)
        if prepared is not self.last:
            self.homes.reserve(prepared.on_disk)
        self.store.adopt_replaced()
        self.store.gradients.leave()
        self.store.copies.staying = prepared.at_step
        self.call = call = StreamCall(self.store, found, prepared, self.device, self._live, self.homes.states)
        self.last = prepared
        try:
            self._allocator.begins()
            with checkpointing_off(), call.followed():
                return call.watched(original(*args, **kwargs))
        except BaseException:
            call.abort()
            raise
        finally:
            self.call = None
            call.end_forward()

    def call_block(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A block's ``__call__``, within the model's."""
        block = self.store.uses[position]
        if self._bypass or block in self.pinned.blocks:
            return original(*args, **kwargs)
        if self._observation is not None:
            return self._observation.observe(position, original, args, kwargs)
        if not torch.is_grad_enabled():
            if block is None:
                return original(*args, **kwargs)
            return self._forward_only.call_block(block, original, args, kwargs)
        if self.call is None or self.call.closed:
            if position >= self.wide and block is not None and not trains(self.blocks[position], args, kwargs):
                return self._forward_only.call_block(block, original, args, kwargs)  # nothing will be differentiated
            raise InputError(
                f"block {position} ({type(self.blocks[position]).__name__}) of a streamed model was called by "
                "itself; call the model that was given to stream(), or call the block under torch.no_grad()"
                + ("" if position < self.wide else "; or name blocks=[...], so that all else stays on the device")
            )
        if self.call.plain:
            return self.call.run_plain(position, original, args, kwargs)
        return apply_block(self.call, position, original, args, kwargs)

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Inside, calls that end do not disturb the store."""
        return self._live.working()

    # -- plans ------------------------------------------------------------------------------------------------------

    def machine(self) -> Machine:
        """Speeds of the links: given, or measured once."""
        if self._machine is None:
            self._machine = self.homes.measured()
        return self._machine

    def replan(self) -> None:
        """Forget all plans: the optimizer, or what is trainable, has changed."""
        self._prepared.clear()
        self._beside.clear()
        self._forward_only.forget()

    def prepare_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """The plans for a call with these arguments, without running it."""
        self._forward_only.end()
        base = class_of(self.model)
        with torch.enable_grad():
            found = self._prepare(lambda *a, **k: base.__call__(self.model, *a, **k), args, kwargs)
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

    def _prepare(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared | None:
        """Plans for this call, None where it drops every block at random."""
        if self.store.divide_thawed(live=bool(self._live.calls)):
            self.replan()
        state, _ = take_apart((args, dict(sorted(kwargs.items()))))
        kind, shapes = key_of(state, self._mode(), self.device), shapes_of(state)
        found = self._prepared.find(kind, shapes)
        if found is None:
            observed = self._observe(original, args, kwargs)
            if not observed.segments:
                some = lambda: bool(self._observe(original, args, kwargs).segments)  # noqa: E731
                check_called_by_chance(self.model, self.device, some)
                return None
            found = prepare(self, observed)
            self._prepared.add(kind, shapes, found)
        return without_results(self, found, self._beside)

    def _observe(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """One observed call, in which no parameter is used that a block might have sent home."""
        self.homes.begin_measuring(wanted=self._machine is None)
        while True:
            self.store.settle()
            self.pinned.bring()
            self._observation = Observation(
                self.model, self.store, self.blocks, self.device, self.progress, wide=self.wide, verify=self.verify
            )
            try:
                with checkpointing_off():
                    found = self._observation.run(original, *copies_of((args, kwargs)))
                staying = found.used_directly
            except StaysPut as one:
                staying = frozenset((one.block,))
            finally:
                self._observation = None
                self.store.settle()
            if staying <= self.pinned.blocks:
                return found
            self.pinned.add(staying)
            self.replan()

    def _mode(self) -> object:
        mode = mode_of(modules_below(self.model))
        self._known.check(mode.identities)
        return mode, self.update

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
        self.optimizer, self.update, self.store.updates.updater = optimizer, optimizer.update, updater
        self.replan()

    def cut_finer(self) -> bool:
        """Let updates need less memory, where no call is under way; returns whether they do now."""
        if self.optimizer is None or self._live.calls or not self.optimizer.cut_finer():
            return False
        self.replan()
        return True

    def run_step(self) -> None:
        """The step phase of the last plan, then blocks with gradients that it does not know; every block is updated
        once. With update="backward" the latter alone, of blocks that are plain tensors."""
        with self._live.working():
            self._forward_only.end()
            self.store.settle()
            self.store.updates.done.clear()
            self._allocator.begins()
            prepared = self.last
            try:
                # Where blocks are at home on the device, no plan has anything to move: all of them are left.
                if prepared is not None and prepared.update == "step" and self.store.home is not Tier.DEVICE:
                    self.store.place(prepared.at_step)
                    self.store.copies.staying = prepared.resident
                    for plan in prepared.plans:
                        blocks = SegmentView(self.store, [])
                        Interpreter(plan.schedule, Runner([], [], self.device), blocks=blocks).run_step()
                    self.store.settle()
                self.store.update_left(self.pinned.blocks if self.update == "backward" else None)
            finally:
                self.store.settle()
            self._allocator.ended()
        self._allocator.look(self)

    def outside_parameters(self) -> list[nn.Parameter]:
        """Parameters that belong to no block: they stay on the device."""
        inside = {id(p) for block in self.store.blocks for p in block.parameters}
        return [p for p in self.model.parameters() if id(p) not in inside]

    def block_parameter_names(self) -> list[str]:
        """Names, as in ``state_dict()``, of the parameters inside the blocks."""
        inside = {id(p) for block in self.store.blocks for p in block.parameters}
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if id(parameter) in inside]

    def home_nbytes(self) -> dict[Tier, int]:
        """Bytes held in each tier now."""
        return {tier: self.pool.held_nbytes(tier) for tier in Tier}

    def close(self) -> None:
        """Bring everything back into memory of its own and remove the files."""
        with self._live.working(), contextlib.suppress(StorageError, InputError):
            self.store.settle()  # what can be read, be it from a removed file or the user's own, is taken all the same
        self.homes.close()
