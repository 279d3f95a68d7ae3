"""Profiling: one careful run of every stage gives its bytes, seconds and traits, without side effects."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.costs import Profile, StageCost
from tapestream.errors import InputError
from tapestream.executor.travel.cargo import copies_to_move
from tapestream.planning.observer import Observer
from tapestream.planning.travellers import Travellers
from tapestream.planning.trials import try_without_graph
from tapestream.planning.uneven import Skewed, may_be_uneven, nbytes_of, skewed
from tapestream.runner.ambient import HostGenerators, TorchGenerators, as_recompute, unchanged_generators
from tapestream.runner.buffers import BufferSnapshot
from tapestream.runner.graph import cast_leaves, next_sequence_number, node_names, reached_leaves
from tapestream.runner.runner import Runner, Tape
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, storages, take_apart
from tapestream.storage.meter import MemoryWatch, watch_memory

_SHORT_SECONDS = 5e-3
_COLD = 4  # times a forward: a first backward that takes longer is timed again
_SETTLING_SECONDS, _MOST_RUNS = 0.02, 8
_LONG_SECONDS = 1e-3  # below, leaving out the end of a recompute costs more than it saves
T = TypeVar("T")
Looks: TypeAlias = tuple[tuple[str, ...], tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]]
"""A stage's graph: the names of its nodes, and what is saved for each tensor saved: shape, strides, dtype."""


class Known(NamedTuple):
    """What a kind of stage costs, and the bytes of all that it saved, parameters included."""

    cost: StageCost
    traits: Traits
    saves_nbytes: int


Alike: TypeAlias = dict[object, Known]
"""Kinds of stages profiled so far in one call."""


def profile_stages(
    stages: Sequence[Stage],
    state: State,
    device: torch.device,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Profile, list[Traits], State]:
    """Run each stage on ``state``: a kind of stage seen before twice forward, a new kind more often and backward too.

    Returns the Profile, with ``initial_nbytes`` 0 since the caller owns its arguments, the traits, and the last
    state as a template. Needs the memory of one stage beyond its input; the RNG, buffers and gradients are as before
    when it returns or raises.
    """
    costs: list[StageCost] = []
    traits: list[Traits] = []
    travellers = Travellers(state)
    alike: Alike = {}
    with unchanged_generators(device), watch_memory(device) as watch:
        for k, stage in enumerate(stages):
            cost, trait, out = profile_stage(stage, state, watch, alike)
            # Where gradients are not counted, nothing that comes before they do can be set off against them.
            costs.append(replace(cost, backward_extra_nbytes=max(0, cost.backward_extra_nbytes)))
            traits.append(trait)
            travellers.follow(state, out)
            state = out
            if progress is not None:
                progress(k + 1, len(stages))
    carried = travellers.carried(costs)
    return Profile(tuple(costs), 0, carried=carried), traits, state


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Memory is measured inside: what the cycle collector frees in between is none of the stage's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@as_recompute()
@collector_off()
def profile_stage(stage: Stage, state: State, watch: MemoryWatch, alike: Alike) -> tuple[StageCost, Traits, State]:
    """Cost and traits of one stage, and its output, from runs on ``state``; buffers are afterwards as before.

    A stage whose run builds the same graph over the same shapes as one in ``alike`` takes over its cost; where sizes
    depend on the data, and costs are upper bounds for that reason, the shapes may differ if they are no larger.
    `recomputing` is true in these runs: none of them is the user's.
    """
    snapshot, device = BufferSnapshot.take(stage.buffer_slots()), watch.device
    try:
        traits, escapes, looks, out, steady = _discover(stage, state, device, snapshot)
        uneven, saves = may_be_uneven(looks[0]), nbytes_of(looks[1])
        runner = Runner([stage], [traits], device)
        if out is None:
            snapshot.put_back()
            out = runner.forward(0, state)
        kind = (looks[0] if uneven else looks, escapes, _kind_of(state, out, traits))
        known = _as_known(alike, kind, traits, saves)
        if known is not None:
            return *known, out
        snapshot.put_back()
        if steady:
            runner.ran(0)
        elif 0 not in runner.seen:
            runner.forward(0, state)  # the first run leaves behind what recomputes need
        skew = _measure_skewed(stage, state, out, traits, watch, snapshot) if uneven else None
        if uneven and skew is None:
            kind = (looks, escapes, _kind_of(state, out, traits))
        cost, out = _measure(runner, state, out, watch, first=not alike and skew is None)
        # From here on nothing is measured but time: a run that nobody watches would leave sizes behind.
        short = cost.forward_seconds < _SHORT_SECONDS
        if short:
            with watch.paused():
                cost = _settled(runner, state, out, cost, device)
        if cost.forward_seconds >= _LONG_SECONDS and not traits.calls_autograd:
            runner.traits = [replace(runner.traits[0], saved=len(looks[1]))]
        if not short:  # watching Python's and NumPy's generators costs nothing beside the stage: it may draw again
            runner.traits = [replace(runner.traits[0], draws_host=True)]
        elif not escapes:
            try_without_graph(runner, state, out)
    finally:
        snapshot.put_back()
    cost = cost if skew is None else skew.bound(cost)
    alike[kind] = Known(cost, runner.traits[0], saves)
    return cost, runner.traits[0], out


def _measure(runner: Runner, state: State, out: State, watch: MemoryWatch, *, first: bool) -> tuple[StageCost, State]:
    """What a stage that has run costs, and its output. ``first``: of its call; the process may never have run such
    kernels, and the times are for all stages of its kind. A GPU's libraries take memory then, too."""
    device = watch.device
    if first and device.type == "cuda":
        _measure_backward(runner, _measure_record(runner, state, 0, watch)[1], out, watch)
    with watch.measured() as meter:
        seconds, out = _clock(device, lambda: runner.forward(0, state))
    output_nbytes = _made_nbytes(state, out)
    cost, tape = _measure_record(runner, state, output_nbytes, watch)
    backward_seconds, backward_extra, _ = _measure_backward(runner, tape, out, watch)
    if first and seconds >= _SHORT_SECONDS and backward_seconds > _COLD * seconds:  # short: see `_settled`
        again, tape = _measure_record(runner, state, output_nbytes, watch)
        cost = replace(cost, record_seconds=min(cost.recorded_seconds, again.recorded_seconds))
        backward_seconds = min(backward_seconds, _measure_backward(runner, tape, out, watch)[0])
    return replace(
        cost,
        forward_seconds=seconds,
        backward_seconds=backward_seconds,
        forward_extra_nbytes=max(0, meter.peak_nbytes - output_nbytes),
        backward_extra_nbytes=max(-cost.saved_nbytes, backward_extra),
        cotangent_nbytes=sum(t.nbytes for t, req in zip(out.tensors, out.requires, strict=True) if req),
    ), out


def _settled(runner: Runner, state: State, out: State, cost: StageCost, device: torch.device) -> StageCost:
    """The cost with the least seconds of several runs: the first few of a short stage, in which memory is fetched from
    the system and caches fill, take several times as long as the thousands that follow."""
    forward, record, backward = cost.forward_seconds, cost.recorded_seconds, cost.backward_seconds
    end = time.perf_counter() + _SETTLING_SECONDS
    for _ in range(_MOST_RUNS):
        forward = min(forward, _clock(device, lambda: runner.forward(0, state))[0])
        seconds, (_, tape) = _clock(device, lambda: runner.record(0, state))
        record = min(record, seconds)
        run = partial(runner.backward, 0, tape, _cotangents(tape, out), {})
        backward = min(backward, _clock(device, run)[0])
        if time.perf_counter() > end:
            break
    return replace(cost, forward_seconds=forward, record_seconds=record, backward_seconds=backward)


def _as_known(alike: Alike, kind: object, traits: Traits, saves_nbytes: int) -> tuple[StageCost, Traits] | None:
    """What a stage of a kind seen before costs, None for a new kind."""
    if kind not in alike or alike[kind].saves_nbytes < saves_nbytes:
        return None
    cost, model, _ = alike[kind]
    host = traits.draws_host or model.draws_host
    return cost, replace(traits, plain_forward=model.plain_forward, draws_host=host, saved=model.saved)


def _kind_of(state: State, out: State, traits: Traits) -> object:
    """What two stages must share, besides their graphs, to cost the same."""
    held = storages(state.tensors)
    shared = tuple(t.untyped_storage().data_ptr() in held for t in out.tensors)
    found = (traits.mutates, traits.calls_autograd, traits.makes_leaves, len(traits.buffers), traits.casts_twice)
    return state.signature(), out.signature(), shared, found, tuple((t.shape, t.dtype) for t in traits.leaves)


def _discover(
    stage: Stage, state: State, device: torch.device, snapshot: BufferSnapshot
) -> tuple[Traits, bool, Looks, State | None, bool]:
    """Run the stage under observation: what it writes, draws and reaches, whether its graph outlives its output, what
    that graph looks like, its output (None where that lies in the copies that the run got of its inputs), and whether
    a recompute of it is a run like any other: it drew nothing and wrote no buffers."""
    generators, host = TorchGenerators.capture(device), HostGenerators.capture()
    observed = Observer()
    everything = Traits(mutates=frozenset(range(len(state.tensors))))
    probe = Runner([stage], [everything], device)
    since = next_sequence_number()
    watching = saved_tensors_hooks(observed.pack, observed.unpack)
    with torch.enable_grad(), probe.autocast.entered(cache=False), watching:
        inputs, _ = probe.guarded(0, state)
        before = [t._version for t in inputs]
        tree = stage.function(state.tree(inputs))
        observed.inside = False
    mutates = (i for i, (t, v) in enumerate(zip(inputs, before, strict=True)) if t._version != v)
    out, live = take_apart(tree)
    mutated = frozenset(mutates)
    _check_aliases(stage.name, state, mutated)
    requires = out.requires
    reached = reached_leaves(live, since, stage.name, probe.own_leaves(inputs))
    casts, uncast, twice = cast_leaves(live)
    looks = (node_names(live), tuple(observed.shapes))
    watched = [weakref.ref(leaf) for leaf in reached]
    own = None if storages(inputs).keys() & storages(out.tensors).keys() else out
    del tree, live, inputs, reached, out
    alive = [leaf for reference in watched if (leaf := reference()) is not None]
    known = {id(p): p for p in (*stage.parameters(), *alive) if p.requires_grad}
    traits = Traits(
        mutates=mutated,
        buffers=snapshot.changed(),
        draws_host=not host.equals(HostGenerators.capture()),
        calls_autograd=observed.called,
        requires=requires,
        leaves=tuple(known.values()),
        casts=casts if probe.autocast.enabled else frozenset(),
        uncast=uncast if probe.autocast.enabled else frozenset(),
        casts_twice=twice,
        makes_leaves=len(alive) < len(watched),
    )
    drew = traits.draws_host or not generators.equals(TorchGenerators.capture(device))
    return traits, observed.something_lives(), looks, own, not drew and not traits.buffers


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


def _measure_record(runner: Runner, state: State, output_nbytes: int, watch: MemoryWatch) -> tuple[StageCost, Tape]:
    """Record once: saved bytes beyond output and input, transient bytes, which states the tape holds."""
    held: dict[int, int] = {}
    packed: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.update(storages((tensor,)))
        own = tensor.detach()  # as in Observer
        packed.append(weakref.ref(own))
        return own

    runner.hooks = lambda _: (pack, lambda tensor: tensor)
    with watch.measured() as meter:
        seconds, (out, tape) = _clock(watch.device, lambda: runner.record(0, state))
    runner.hooks = None
    inputs, outputs = storages(state.tensors), storages(out.tensors)
    saved = max(0, meter.end_nbytes - output_nbytes)
    cost = StageCost(
        0.0,
        0.0,
        output_nbytes,
        saved,
        reads_input=any(a in inputs for a in held),
        reads_output=any(a in outputs and a not in inputs for a in held),
        record_extra_nbytes=max(0, meter.peak_nbytes - meter.end_nbytes),
        record_seconds=seconds,
        saved_storages=copies_to_move([own for one in packed if (own := one()) is not None]),
    )
    return cost, tape


def _measure_backward(runner: Runner, tape: Tape, out: State, watch: MemoryWatch) -> tuple[float, int, int]:
    """Seconds of one backward, its transient bytes beyond cotangents and gradients (negative where these are never all
    there beside what it frees), and its peak with these."""
    cotangents = _cotangents(tape, out)
    with watch.measured() as meter:
        seconds, (given, pairs) = _clock(watch.device, lambda: runner.backward(0, tape, cotangents, {}))
    made = storages([g for g in (*given, *(g for _, g in pairs)) if g is not None])
    return seconds, meter.peak_nbytes - sum(made.values()), meter.peak_nbytes


def _cotangents(tape: Tape, out: State) -> list[torch.Tensor | None]:
    edges = zip(out.tensors, tape.edges, strict=True)
    return [None if edge is None else torch.ones_like(t) for t, edge in edges]


def _measure_skewed(
    stage: Stage, state: State, out: State, traits: Traits, watch: MemoryWatch, snapshot: BufferSnapshot
) -> Skewed | None:
    """What the stage takes when its tokens are all alike; None where it cannot be run on such."""
    state = skewed(state, out)
    try:
        runner = Runner([stage], [traits], watch.device, once=(0,))
        with watch.measured() as meter:
            out = runner.forward(0, state)
        snapshot.put_back()
        output_nbytes = _made_nbytes(state, out)
        runner = Runner([stage], [traits], watch.device, once=(0,))
        cost, tape = _measure_record(runner, state, output_nbytes, watch)
        _, extra, peak = _measure_backward(runner, tape, out, watch)
    except Exception:  # the user's code may stumble over such a batch
        return None
    finally:
        snapshot.put_back()
    forward_extra = max(0, meter.peak_nbytes - output_nbytes)
    return Skewed(cost.saved_nbytes, forward_extra, cost.recorded_extra_nbytes, extra, peak)


def _made_nbytes(state: State, out: State) -> int:
    """Bytes of ``out`` that are not those of ``state``."""
    held = storages(state.tensors)
    return sum(n for a, n in storages(out.tensors).items() if a not in held)


def _clock(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


@contextlib.contextmanager
def undisturbed(stages: Sequence[Stage], device: torch.device, own: Sequence[object] = ()) -> Iterator[None]:
    """Random generators (``own``: and these) and the stages' buffers are afterwards as they were before."""
    snapshots = [BufferSnapshot.take(stage.buffer_slots()) for stage in stages]
    try:
        with unchanged_generators(device, own):
            yield
    finally:
        for snapshot in snapshots:
            snapshot.put_back()
