"""`Observation`: the model's first call with new shapes, block by block, each profiled where it stands."""

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from tapestream.accelerator.memory import storage_nbytes, tensor_nbytes
from tapestream.accelerator.streams import stopwatch
from tapestream.capture.buffers import BufferSnapshot, buffer_slots
from tapestream.costs import StageCost
from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.frontends.check import check_deterministic
from tapestream.frontends.module.homes.wide import DirectUse, parameters_of, reads_parameters
from tapestream.frontends.module.lazy_logits import LazyLogits
from tapestream.frontends.module.observing.arguments import BlockRun, ChangedContainer, Link
from tapestream.frontends.module.observing.hooks import ReplacedOutput, hooks_unchanged
from tapestream.frontends.module.observing.left_out import LeftOut
from tapestream.frontends.module.observing.observed import Observed, Segment
from tapestream.frontends.module.observing.own import others_of, shows
from tapestream.frontends.module.observing.passing import Passed
from tapestream.frontends.module.observing.returned import Turn, references, still_held
from tapestream.frontends.module.observing.reused import Reused
from tapestream.frontends.module.observing.written import parameters_unwritten
from tapestream.frontends.module.swap import own_call
from tapestream.frontends.module.work.observed import ObservedWork, behind_work, given_to, with_work
from tapestream.ir.actions import Tier
from tapestream.planning.profile import Profiled, profile_stage
from tapestream.planning.travellers import Travellers
from tapestream.runner.ambient import Autocast, unchanged_generators
from tapestream.runner.belongings import unchanged
from tapestream.runner.graph import leaves_behind, root_of_graph
from tapestream.runner.guards import Guard, hooks_off
from tapestream.runner.private import tensors_in
from tapestream.runner.stage import Stage, Traits, is_compiled
from tapestream.runner.state import State, storages, take_apart
from tapestream.runner.trees import tree_leaves
from tapestream.storage.meter import MemoryMeter, MemoryWatch, watch_memory
from tapestream.system.collector import collector_off


class StaysPut(Exception):
    """The module of parameter block ``block``, outside the repeated ones, cannot run as one of these."""

    def __init__(self, block: int) -> None:
        super().__init__(block)
        self.block = block


class Observation:
    """Profiles one call of the model without side effects: generators, buffers and gradients are afterwards as
    before."""

    def __init__(
        self,
        model: nn.Module,
        store: BlockStore,
        blocks: Sequence[nn.Module],
        device: torch.device,
        progress: Callable[[str, int, int], None],
        *,
        called: nn.Module,
        passed: set[int],
        wide: int,
        verify: bool,
        parts: Container[int] | None,
    ) -> None:
        """``called``: the model, or what the user has called of it; ``passed``: positions of blocks known to pass
        tensors on in objects; ``wide``: the position of the first of the blocks that are modules outside of the
        repeated ones; ``parts``: positions of blocks to which no work links the block before (None: all)."""
        self.model, self.store, self.blocks, self.device = model, store, blocks, device
        self.progress, self.verify, self._wide = progress, verify, wide
        self._direct = DirectUse(parameters_of(store, range(wide, len(blocks))))
        self._profiled, self._passed = Profiled(), Passed(passed)
        self.segments: list[Segment] = []
        self._link, self._reused, self._work = Link(), Reused(), ObservedWork(device, parts)
        self._recorded = True  # whether the last block ran with gradients on
        self._left_out = LeftOut(model, blocks[:wide], called)
        self._root = root_of_graph()
        self._outside: contextlib.ExitStack | None = None  # the meter of what runs between blocks
        self._meter: MemoryMeter | None = None
        self._before_nbytes = self._left_nbytes = 0
        self._watch: MemoryWatch | None = None
        self._held: tuple[torch.Tensor, ...] = ()
        self._alive: list[torch.Tensor] = []  # what a call that is not observed holds until its backward
        self._outputs: list[tuple[StorageWeakRef, int]] = []  # of all blocks
        self._first: frozenset[int] | None = None  # ids of leaves behind what the first block is given
        self._later: set[int] = set()

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """Call the model once; `observe` sees its blocks (none of them, if the model drops all)."""
        inside = {id(m) for block in self.blocks for m in block.modules()}
        outside = [m for m in self.model.modules() if id(m) not in inside]
        snapshot = BufferSnapshot.take(buffer_slots(outside))
        try:
            with (
                unchanged(list(self.model.modules())),
                parameters_unwritten(self.model, outside),
                unchanged_generators(self.device),
                hooks_unchanged(list(self.model.modules())) as hooked,
                self._uncached(),
                watch_memory(self.device) as self._watch,
            ):
                try:
                    self._measure_outside()
                    turn = self._turn([original(*args, **kwargs)])
                    self._observe_the_rest()
                finally:
                    self._stop_measuring()
                    self._alive.clear()
            written = bool(snapshot.changed())
            for segment in self.segments:
                segment.reused = self._reused.any and not any(map(is_compiled, outside))
        finally:
            snapshot.put_back()
            self._profiled.put_back()
        before = self._before_nbytes + self._left_nbytes + self._reused.held_nbytes + hooked.nbytes
        return Observed(
            self.segments, before, self._left_nbytes, turn, written,
            frozenset(self._direct.found), (self._first or frozenset()) - self._later, self._passed.again,
            frozenset(self._work.written),
        )  # fmt: skip

    def _uncached(self) -> contextlib.AbstractContextManager[None]:
        """Casts made here must not be found by the call itself: a weight's parts would be added in another order."""
        autocast = Autocast.capture(self.device)
        return autocast.entered(cache=False) if autocast.enabled else contextlib.nullcontext()

    def _turn(self, returned: list[Any]) -> Turn:
        """Differentiate what the model ``returned`` down to the last block's output, as the user's backward will. The
        list is emptied on the way: only it may hold that."""
        seconds = self._since_block()
        found = [t for t in tree_leaves(returned) if isinstance(t, torch.Tensor) and t.requires_grad]
        roots = [t for t in found if t.dim() == 0]  # a loss that the model computes itself is what is used
        roots = roots or [t.materialised() if isinstance(t, LazyLogits) else t for t in found]
        outer = [*roots, *(t for t in found if not isinstance(t, LazyLogits))]
        self._later.update(map(id, leaves_behind(outer)))
        self._reused.look(outer)
        self._reused.end()
        del outer
        leaves = [get_gradient_edge(t) for t in self._link.tensors if t.requires_grad and self._recorded]
        inside = {id(p) for block in self.blocks for p in block.parameters()}
        # A norm's weight gets a sum over a product as large as the state; a matrix's gradient is counted elsewhere.
        weights = [p for p in self.model.parameters() if p.requires_grad and p.dim() < 2 and id(p) not in inside]
        forward, results = self._stop_measuring(), references(returned)
        assert forward is not None
        assert self._watch is not None
        states = still_held(self._outputs)  # those among the results are the blocks' business
        own = {t.untyped_storage().data_ptr() for t in roots}
        kept = sum(storage_nbytes(one) for one in states if one.data_ptr() not in own)
        with self._watch.measured() as dropping:
            found.clear()
            returned.clear()
        states += still_held(results)  # by the graph: the first plan is for those who hold all
        self._measure_outside()
        since = stopwatch(self.device)
        made: tuple[torch.Tensor | None, ...] = ()
        if roots and leaves:
            with hooks_off(weights):
                wanted: list[Any] = [*leaves, *weights]
                seeds = [torch.ones_like(t) for t in roots]
                made = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        seconds += since()
        backward = self._stop_measuring()
        assert backward is not None
        given = [t for t in made[: len(leaves)] if t is not None]
        cotangents = sum(storages(given).values())  # the simulator counts them itself
        loss = sum(tensor_nbytes(t) for t in roots if t.numel() > 1)
        return Turn.of(forward, dropping, backward, besides=cotangents, loss=loss, states=kept, seconds=seconds)

    def _measure_outside(self, *held: torch.Tensor) -> None:
        """Measure until the next block. ``held``: what the caller is about to drop, kept so long, as the section does
        not make room by that."""
        assert self._watch is not None
        self._held = held
        self._outside = contextlib.ExitStack()
        if self._wide < len(self.blocks):
            self._outside.enter_context(self._direct)
        if self._work.traces:
            self._outside.enter_context(self._work.trace)
        self._outside.enter_context(collector_off())
        self._meter = self._outside.enter_context(self._watch.measured())
        self._since_block = stopwatch(self.device)

    def _stop_measuring(self) -> MemoryMeter | None:
        self._work.ends()
        meter, outside = self._meter, self._outside
        self._meter = self._outside = None
        if outside is not None:
            outside.close()
        self._held = ()
        return meter

    def observe(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Profile one block, and what its container has left out before it; returns its output, cut off from the
        graph."""
        if position >= self._wide:
            block = self.store.uses[position]
            if block is not None and self._direct.keeps(self.blocks[position], args, kwargs):
                self.store.lend(block)
                return original(*args, **kwargs)
            try:
                return self._observe(position, original, args, kwargs)[0]
            except ReplacedOutput as error:
                if block is None:
                    raise
                raise StaysPut(block) from error
        for other in self._left_out.before(position):
            args, kwargs = self._observe_left_out(other, args, kwargs, None)
        result, run = self._observe(position, original, args, kwargs)
        self._left_out.note(position, args, kwargs, run, self._link, self.segments[-1])
        return result

    def _observe_left_out(
        self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], segment: Segment | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Profile a block that this call has dropped. Returns what the next block would be given: if this one cannot
        be run here, the same."""
        block, link = self.blocks[position], self._link
        try:
            _, run = self._observe(position, lambda *a, **k: own_call(block, a, k), args, kwargs, segment)
        except Exception:
            self._link = link
            self._stop_measuring()
            self._measure_outside()
            return args, kwargs
        return self._left_out.note(position, args, kwargs, run, self._link, segment or self.segments[-1])

    def _observe_the_rest(self) -> None:
        """What containers have left out after the last of their blocks that was called."""
        for other, args, kwargs, link, segment in self._left_out.rest():
            self._link = link
            self._measure_outside()
            self._observe_left_out(other, args, kwargs, segment)

    def _refuse_shown(self, position: int, block: int) -> None:
        """A block that returns its own bytes must not leave the device: always raises."""
        if position >= self._wide:
            raise StaysPut(block)
        name = type(self.blocks[position]).__name__
        raise InputError(
            f"block {position} ({name}) returns one of its parameters, or a view of it, whose memory is reused as soon "
            "as the block has left the device; return a clone() of it"
        )

    def _observe(
        self,
        position: int,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        segment: Segment | None = None,
    ) -> tuple[Any, BlockRun]:
        passed = position >= self._wide or position in self._passed.positions or position in self._work.parts
        linked = None if passed else self._work.links(tensors_in([args, kwargs]), self._link)
        meter, seconds = self._stop_measuring(), self._since_block()
        behind = frozenset(map(id, leaves_behind(tensors_in([args, kwargs]))))
        self._reused.look(tensors_in([args, kwargs]))
        if self._first is None:
            self._first = behind
        else:
            self._later |= behind
        bare = Stage(position, self.blocks[position])
        run, state, (cost, traits, out) = self._profile(position, bare, original, args, kwargs)
        if meter is not None:
            entering = linked.both_nbytes if linked is not None else 0 if run.linked else _nbytes(state)
            self._before_nbytes += max(0, meter.end_nbytes - entering)
        if linked is not None:
            work = linked.segment.costs[-1], linked, meter, seconds, self._reused.within_chain()
            linked.segment.costs[-1] = with_work(*work)
            cost = behind_work(cost, linked.own_nbytes)
        elif segment is None and not run.linked:
            parted = f"before block {position}: {self._work.why}" if self.segments else None
            self.segments.append(Segment(initial_nbytes=_nbytes(state), travellers=Travellers(state), parted=parted))
            self._alive += state.tensors
        segment = segment or self.segments[-1]
        # What a block leaves in objects must keep its graph, by which a later use of it is refused.
        traits = replace(traits, others=others_of(position, self.blocks, traits), plain_forward=False)
        segment.positions.append(position)
        segment.costs.append(replace(cost, reads_parameters=reads_parameters(self.blocks[position])))
        segment.traits.append(traits)
        segment.stages.append(bare)
        segment.clones.append(run.writes)
        segment.passes.append(position in self._passed.positions)
        segment.cuts.append(None if linked is None else linked.cut)
        self._left_nbytes, things = self._left_nbytes + run.take_over(), run.things
        # Nodes, not leaves: what runs outside may change its input in place.
        last = tuple(
            Guard.apply(self._root, t, bare.name) if requires else t.detach()  # type: ignore[no-untyped-call]
            for t, requires in zip(out.tensors, out.requires, strict=True)
        )
        self._outputs += references(last)
        given = given_to(run)
        (result, self._link), self._recorded = run.finish(out, last), torch.is_grad_enabled()
        self._work.begin(position, segment, linked, state, out, given, self._link, may_follow=position < self._wide)
        self._passed.note(things, position)
        self._reused.note(tensors_in([args, kwargs]))
        self._alive += run.held
        self.progress("profiling", sum(len(s.positions) for s in self.segments), len(self.blocks))
        self._measure_outside(*state.tensors, *tensors_in([args, kwargs]))
        return result, run

    def _profile(
        self, position: int, bare: Stage, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[BlockRun, State, tuple[StageCost, Traits, State]]:
        """One block as a stage, again where it turns out to pass tensors on in objects or containers."""
        passes = position in self._passed.positions
        run = BlockRun(bare.name, original, bare.modules, args, kwargs, self._link, self._reused.current, passes=passes)
        run.keep_arguments(clone=True, graph=False)  # whatever is left: a call in plain PyTorch's graph may use it
        self._passed.note(run.things, None)
        state, _ = take_apart(run.flat)
        stage, block, watch = bare.calling(run), self.store.uses[position], self._watch
        assert watch is not None
        brought = block is not None and self.store.lend(block)
        try:
            if self.verify:
                check_deterministic([stage], state, self.device)
            with hooks_off(bare.parameters()):
                found = profile_stage(stage, state, watch, self._profiled)
            if block is not None and self.store.home is not Tier.DEVICE and shows(found[2], self.blocks[position]):
                self._refuse_shown(position, block)
            used = run.passed(found[1].leaves)
            if passes:
                self._passed.found(position, run.inside)
        except ChangedContainer:
            used = []
        else:
            if passes or not used:
                return run, state, found
        finally:
            if block is not None and brought:
                self.store.give_back(block)
        self._passed.found(position, used)
        return self._profile(position, bare, original, args, kwargs)


def _nbytes(state: State) -> int:
    return sum(storages(state.tensors).values())
