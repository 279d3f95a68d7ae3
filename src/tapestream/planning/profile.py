"""Profiling: one careful run of every stage gives its bytes, seconds and traits, without side effects."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from tapestream.capture.buffers import BufferSnapshot
from tapestream.capture.cells import Cell, Contents
from tapestream.capture.observe import Observation, UnknownModules, observed
from tapestream.capture.rebinding import Rebinding
from tapestream.capture.snapshot import Snapshot
from tapestream.costs import Profile, StageCost
from tapestream.errors import InputError
from tapestream.planning import stage_costs
from tapestream.planning.gradient_costs import without_set_off
from tapestream.planning.observer import Observer
from tapestream.planning.repeating import check_generators, check_repeats, check_runs_alike
from tapestream.planning.travellers import Travellers
from tapestream.planning.trials import try_without_graph
from tapestream.planning.uneven import may_be_uneven, nbytes_of
from tapestream.runner.ambient import HostGenerators, TorchGenerators, as_recompute, unchanged_generators
from tapestream.runner.belongings import Belongings, Change, unchanged, undo
from tapestream.runner.bits import same_bits
from tapestream.runner.captured import leaves_captured
from tapestream.runner.depth import check_depth
from tapestream.runner.graph import next_sequence_number, node_names, reached_leaves, used_again, uses_of_leaves
from tapestream.runner.guards import hooks_off, refusing_backward
from tapestream.runner.hooks import backward_hooks_off
from tapestream.runner.inside import attends
from tapestream.runner.kernels import algorithms_not_tried
from tapestream.runner.left import left_by
from tapestream.runner.modes import as_a_stage
from tapestream.runner.own_frames import leave_own_frames
from tapestream.runner.passable import check_modules, check_passable
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, storages, take_apart
from tapestream.runner.unneeded import End, Reading
from tapestream.storage.meter import MemoryWatch, watch_memory
from tapestream.system.collector import collector_off

_LONG_SECONDS = 2e-4  # of the end of a recompute: to leave out a shorter one costs more than it saves
_SETTLED, _MOST_KINDS = set[object](), 1000
Looks: TypeAlias = tuple[tuple[str, ...], tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]]
"""A stage's graph: the names of its nodes, and what is saved for each tensor saved: shape, strides, dtype."""


class Known(NamedTuple):
    """What a kind of stage costs, and the bytes of all that it saved, parameters included."""

    cost: StageCost
    traits: Traits
    saves_nbytes: int


@dataclass(slots=True)
class Profiled:
    """What one call has found so far: the kinds of stages, and what their runs have changed besides buffers."""

    alike: dict[object, Known] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def put_back(self) -> None:
        """Undo these changes: the user's own run makes them."""
        undo(self.changes)
        self.changes.clear()


def profile_stages(
    stages: Sequence[Stage],
    state: State,
    device: torch.device,
    *,
    gradients_within: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Profile, list[Traits], State]:
    """Run each stage on ``state``: a kind of stage seen before twice forward, a new kind more often and backward too.

    ``gradients_within``: gradients of leaves will count (see `with_gradients`). Returns the Profile (``initial_nbytes``
    0: the caller owns its arguments), the traits, and the last state as a template. Needs the memory of one stage
    beyond its input; afterwards RNG, buffers and gradients are as before.
    """
    costs, traits = list[StageCost](), list[Traits]()
    travellers, profiled = Travellers(state), Profiled()
    with unchanged_generators(device), watch_memory(device) as watch, contextlib.ExitStack() as stack:
        stack.callback(profiled.put_back)
        for k, stage in enumerate(stages):
            with hooks_off([*stage.parameters(), *leaves_captured(stage.function)]):
                cost, trait, out = profile_stage(stage, state, watch, profiled)
            costs.append(cost if gradients_within else without_set_off(cost))
            traits.append(trait)
            travellers.follow(state, out)
            state = out
            if progress is not None:
                progress(k + 1, len(stages))
    costs = stage_costs.with_behind(costs, [trait.behind_nbytes for trait in traits])
    carried = travellers.carried(costs)
    return Profile(tuple(costs), 0, carried=carried), traits, state


@as_recompute()
@collector_off()
def profile_stage(
    stage: Stage, state: State, watch: MemoryWatch, profiled: Profiled
) -> tuple[StageCost, Traits, State]:
    """Cost and traits of one stage, and its output, from runs on ``state``; buffers are afterwards as before.

    A stage whose run builds the same graph over the same shapes as one in ``profiled`` takes over its cost; where sizes
    depend on the data, and costs are upper bounds, the shapes may differ if they are no larger. `recomputing` is true.
    """
    check_modules(stage.name, stage.modules)
    device, alike = watch.device, profiled.alike
    snapshot, found = _discovered(stage, state, device, profiled.changes)
    traits, escapes, looks, out, steady, ending = found
    try:
        check_depth(len(looks[0]), device)
        uneven, saves = may_be_uneven(looks[0]), nbytes_of(looks[1])
        runner = Runner([stage], [traits], device)
        if out is None:
            snapshot.put_back()
            out = runner.forward(0, [state])
        # An expert that no token goes to leaves no nodes of its own.
        kind = (frozenset(looks[0]) if uneven else looks, escapes, _kind_of(state, out, traits))
        known = _as_known(alike, kind, traits, saves)
        if known is not None:
            return *known, out
        snapshot.put_back()
        if steady:
            runner.ran(0)
        elif 0 not in runner.seen:
            out = runner.forward(0, [state])  # the first run leaves behind what recomputes need
        skew = stage_costs.measure_skewed(stage, state, out, traits, watch, snapshot) if uneven else None
        if uneven and skew is None:
            kind = (looks, escapes, _kind_of(state, out, traits))
        cost, again, behind = stage_costs.measure(runner, state, out, watch, first=not alike and skew is None)
        check_repeats(stage.name, out, again)
        out = again
        runner.traits = [replace(traits, behind_nbytes=behind)]
        if escapes and traits.left:
            runner.traits = [replace(runner.traits[0], left_graph=stage_costs.graph_nbytes(runner, state, out, watch))]
        # From here on nothing is measured but time: a run that nobody watches would leave sizes behind.
        short = cost.forward_seconds < stage_costs.SHORT_SECONDS
        if short:
            with watch.paused(), backward_hooks_off(stage.modules):
                cost = stage_costs.settled(runner, state, out, cost, device, again=_is_settled((looks[0], device)))
        if attends(looks[0]) and not traits.calls_autograd and skew is None:
            with watch.paused(), backward_hooks_off(stage.modules):
                cost = stage_costs.with_inside(runner, state, out, cost, device)
        if device.type != "cpu":
            ending = cost.forward_seconds / 5  # what a GPU is asked to do ends later than the call
        if ending >= _LONG_SECONDS and not (traits.calls_autograd or traits.reads):
            runner.traits = [replace(runner.traits[0], end=End(len(looks[1])))]
        if not short:  # watching Python's and NumPy's generators costs nothing beside the stage: it may draw again
            runner.traits = [replace(runner.traits[0], draws_host=True)]
        elif not escapes:
            try_without_graph(runner, state, out)
    finally:
        snapshot.put_back()
    cost = cost if skew is None else skew.bound(cost)
    alike[kind] = Known(cost, runner.traits[0], saves)
    return cost, runner.traits[0], out


def _is_settled(kind: object) -> bool:
    """Whether short stages of this kind have settled in this process, of whatever shapes; from now on, they have."""
    known = kind in _SETTLED
    if len(_SETTLED) >= _MOST_KINDS:
        _SETTLED.clear()
    _SETTLED.add(kind)
    return known


def _as_known(
    alike: dict[object, Known], kind: object, traits: Traits, saves_nbytes: int
) -> tuple[StageCost, Traits] | None:
    """What a stage of a kind seen before costs, None for a new kind."""
    if kind not in alike or alike[kind].saves_nbytes < saves_nbytes:
        return None
    cost, model, _ = alike[kind]
    host = traits.draws_host or model.draws_host
    left, behind = model.left_graph, model.behind_nbytes
    return cost, replace(
        traits, plain_forward=model.plain_forward, draws_host=host, end=model.end, left_graph=left, behind_nbytes=behind
    )


def _kind_of(state: State, out: State, traits: Traits) -> object:
    """What two stages must share, besides their graphs, to cost the same."""
    held = storages(state.tensors)
    shared = tuple(t.untyped_storage().data_ptr() in held for t in out.tensors)
    found = (traits.mutates, traits.calls_autograd, traits.makes_leaves, len(traits.buffers), traits.casts_twice,
             traits.reads)  # fmt: skip
    return state.signature(), out.signature(), shared, found, tuple((t.shape, t.dtype) for t in traits.leaves)


class _Discovered(NamedTuple):
    """What a stage writes, draws and reaches; whether its graph outlives its output, and what that graph looks like;
    its output (None where that lies in the copies that the run got of its inputs); whether a recompute of it is a run
    like any other: it drew nothing and wrote no buffers; seconds that what follows its last saved tensor takes."""

    traits: Traits
    escapes: bool
    looks: Looks
    out: State | None
    steady: bool
    ending_seconds: float


def _discovered(
    stage: Stage, state: State, device: torch.device, changes: list[Change]
) -> tuple[Snapshot, _Discovered]:
    """What was there before the stage first ran, and what that run shows; the stage learns what modules it calls."""
    for looks in stage.learning():
        snapshot = Snapshot.of(stage.modules)
        try:
            return snapshot, _discover(stage, state, device, snapshot, changes, looks=looks)
        except UnknownModules as unknown:
            snapshot.put_back()
            stage.reaches(unknown.modules)
        except BaseException:
            snapshot.put_back()
            raise
    raise AssertionError("the last try does not look")


def _discover(
    stage: Stage, state: State, device: torch.device, snapshot: Snapshot, changes: list[Change], *, looks: bool
) -> _Discovered:
    """Run the stage under observation. What it changes besides its buffers is added to ``changes``; raises InputError
    where it would find that changed when it runs again."""
    generators, belongings = TorchGenerators.capture(device), Belongings(stage.modules, stage.function)
    host, graph, since = HostGenerators.capture(), Observer(), next_sequence_number()
    probe = Runner([stage], [Traits(mutates=frozenset(range(len(state.tensors))))], device)
    watching, casting = saved_tensors_hooks(graph.pack, graph.unpack), probe.autocast.entered(cache=False)
    asked = refusing_backward(stage.name, [*stage.parameters(), *leaves_captured(stage.function)])
    with asked, as_a_stage(device), casting, watching:
        inputs, edges = probe.guarded(0, state)
        before, reading = [(t._version, t.grad_fn) for t in inputs], Reading(stage.name, inputs)
        tree, seen = _called(stage, state, inputs, reading, belongings, snapshot, looks)
        graph.ended()
    mutated = frozenset(i for i, (t, (v, _)) in enumerate(zip(inputs, before, strict=True)) if t._version != v)
    out, live = take_apart(tree)
    check_passable(stage.name, out, live)
    _check_aliases(stage.name, state, mutated)
    reached = reached_leaves(live, since, stage.name, probe.own_leaves(inputs))
    uses, again = uses_of_leaves(live), used_again(live, [node for _, node in before])
    looked, watched = (node_names(live), tuple(graph.shapes)), [weakref.ref(leaf) for leaf in reached]
    graph.watch((*edges, *(get_gradient_edge(t) for t in (*stage.parameters(), *reached) if t.requires_grad)))
    own = None if storages(inputs).keys() & storages(out.tensors).keys() else out
    del tree, live, inputs, reached, edges, before
    alive = [leaf for reference in watched if (leaf := reference()) is not None]
    traits = Traits(
        mutates=mutated,
        buffers=snapshot.buffers.changed(),
        cells=seen.cells,
        draws_host=not host.equals(HostGenerators.capture()),
        calls_autograd=graph.called,
        requires=out.requires,
        leaves=tuple({id(p): p for p in (*stage.parameters(), *alive) if p.requires_grad}.values()),
        casts=uses.casts if probe.autocast.enabled else frozenset(),
        uncast=uses.uncast if probe.autocast.enabled else frozenset(),
        casts_twice=uses.casts_twice,
        repeated=uses.repeated,
        inputs_repeated=again,
        makes_leaves=len(alive) < len(watched),
        reads=reading.found,
        rebinds=seen.rebinds,
        saves=len(looked[1]),
        nodes=len(looked[0]),
    )
    drew, lives = not generators.still(), graph.something_lives()

    def repeats() -> bool:
        generators.restore()
        host.restore()
        snapshot.put_back()
        with as_a_stage(device), probe.autocast.entered(cache=False), Rebinding():
            found, _ = take_apart(stage.function(state.tree(probe.guarded(0, state)[0])))
        return found.same_structure(out) and all(map(same_bits, found.tensors, out.tensors))

    drawn, leaving = check_runs_alike(stage, belongings, repeats, changes, seen)
    check_generators(stage, belongings, drawn)
    traits = replace(traits, draws_host=traits.draws_host or bool(drawn), generators=drawn, left=left_by(leaving))
    steady = not (drew or traits.draws_host or traits.buffers or traits.cells)
    return _Discovered(traits, lives, looked, own, steady, graph.ending_seconds)


def _called(
    stage: Stage, state: State, inputs: list[torch.Tensor], reading: Reading, belongings: Belongings,
    snapshot: Snapshot, looks: bool,
) -> tuple[Any, Observation]:  # fmt: skip
    """The stage's result, with ``reading`` on; not where something is compiled, which would be again for a mode."""
    tree, compiled = state.tree(inputs), stage.is_compiled()
    if compiled:
        leave_own_frames()
    reads = contextlib.nullcontext() if compiled else reading
    try:
        with observed(inputs, stage.modules, calls=looks) as seen, reads:
            snapshot.observations.append(seen)
            return stage.function(tree), seen
    except UnknownModules:
        undo(belongings.changes(Belongings(stage.modules, stage.function)))
        raise


def _check_aliases(name: str, state: State, mutated: frozenset[int]) -> None:
    """A stage that writes into its input gets a copy of that tensor; others over the same bytes would not see the
    write."""
    behind = [t.untyped_storage().data_ptr() for t in state.tensors]
    for i in mutated:
        if behind.count(behind[i]) > 1:
            raise InputError(
                f"{name} changes a tensor of its input in place that shares memory with another tensor of that state; "
                "make the operation out of place, or clone() one of the two in the stage before"
            )


@contextlib.contextmanager
def undisturbed(
    stages: Sequence[Stage], device: torch.device, own: Sequence[object] = (), cells: Sequence[Cell] = ()
) -> Iterator[None]:
    """Random generators (and ``own``), the stages' buffers, ``cells`` and the rest are afterwards as before."""
    snapshots = [BufferSnapshot.take(stage.buffer_slots()) for stage in stages]
    contents = Contents.take(cells)
    try:
        with unchanged_generators(device, own), algorithms_not_tried(device), contextlib.ExitStack() as stack:
            for stage in stages:
                stack.enter_context(hooks_off([*stage.parameters(), *leaves_captured(stage.function)]))
                stack.enter_context(unchanged(stage.modules, stage.function))
            yield
    finally:
        contents.put_back()
        for snapshot in snapshots:
            snapshot.put_back()
