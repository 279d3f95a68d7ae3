"""What a stage costs: bytes and seconds of its forward, of its recording and of its backward, measured."""

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import tensor_nbytes
from tapestream.accelerator.streams import timed
from tapestream.capture.snapshot import Snapshot
from tapestream.costs import StageCost
from tapestream.executor.travel.cargo import copies_to_move
from tapestream.planning.uneven import Skewed, skewed
from tapestream.runner.bits import same_bits
from tapestream.runner.entry import Tape
from tapestream.runner.hooks import backward_hooks_off
from tapestream.runner.inside import nbytes_of
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, storages
from tapestream.storage.meter import MemoryWatch

SHORT_SECONDS = 5e-3
INSIDE_SECONDS = 1e-2  # a forward of less is not worth the two runs that tell what it could keep of its inside
INSIDE_SHARE = 0.05  # of a forward: times are noisy, and less is not worth its bytes
_COLD = 4  # times a forward: a first backward that takes longer is timed again
_SETTLING_SECONDS, _MOST_RUNS = 0.02, 8
_AGAIN_SECONDS = 0.002
T = TypeVar("T")


def measure(
    runner: Runner, state: State, out: State, watch: MemoryWatch, *, first: bool
) -> tuple[StageCost, State, int]:
    """What a stage that has run costs, its output, and bytes behind the cotangents that its backward gives (see
    `with_behind`). ``first``: of its call; the process may never have run such kernels, and the times are for all
    stages of its kind. A GPU's libraries take memory then, too."""
    device = watch.device
    if first and is_accelerator(device):
        _measure_backward(runner, _measure_record(runner, state, 0, watch)[1], out, watch)
    with watch.measured() as meter:
        seconds, out = timed(device, lambda: runner.forward(0, [state]))
    output_nbytes = _made_nbytes(state, out)
    cost, tape = _measure_record(runner, state, output_nbytes, watch)
    backward_seconds, backward_extra, _, behind = _measure_backward(runner, tape, out, watch)
    if first and seconds >= SHORT_SECONDS and backward_seconds > _COLD * seconds:  # short: see `_settled`
        with backward_hooks_off(runner.stages[0].modules):
            again, tape = _measure_record(runner, state, output_nbytes, watch)
            backward_seconds = min(backward_seconds, _measure_backward(runner, tape, out, watch)[0])
        cost = replace(cost, record_seconds=min(cost.recorded_seconds, again.recorded_seconds))
    cost = replace(
        cost,
        forward_seconds=seconds,
        backward_seconds=backward_seconds,
        forward_extra_nbytes=max(0, meter.peak_nbytes - output_nbytes),
        backward_extra_nbytes=max(-cost.saved_nbytes, backward_extra),
        cotangent_nbytes=sum(tensor_nbytes(t) for t, req in zip(out.tensors, out.requires, strict=True) if req),
    )
    return cost, out, behind


def with_behind(costs: Sequence[StageCost], behind: Iterable[int]) -> list[StageCost]:
    """The stages, with the bytes ``behind`` the cotangents that the backward of each gives, beyond what these show: one
    may be a part of more, as the real part of complex numbers is. It is that of the output of the stage before."""
    found = list(costs)
    for k, nbytes in enumerate(behind):
        if nbytes and k:
            found[k - 1] = replace(found[k - 1], cotangent_nbytes=found[k - 1].cotangent_bytes + nbytes)
        elif nbytes:
            found[0] = replace(found[0], backward_extra_nbytes=found[0].backward_extra_nbytes + nbytes)
    return found


def graph_nbytes(runner: Runner, state: State, out: State, watch: MemoryWatch) -> int:
    """Bytes that a stage which leaves a tensor with its graph leaves beyond that tensor: what operations saved that
    nobody differentiates, and what functions keep on their contexts."""
    traits = runner.traits[0]
    runner.traits = [replace(traits, plain_forward=True)]
    runner.forward(0, [state])  # it leaves the same tensor without a graph, which the next run replaces
    runner.traits = [traits]
    with watch.measured() as meter:
        made, tape = runner.record(0, [state])
        cotangents = _cotangents(tape, out)
        gradients = runner.backward(0, tape, cotangents, {})
        del made, tape, cotangents, gradients
    return max(0, meter.end_nbytes)


def with_inside(runner: Runner, state: State, out: State, cost: StageCost, device: torch.device) -> StageCost:
    """The cost, with what a run that keeps its attention spares the one that records, and how many bytes it keeps.
    ``out``: of a run that is given nothing; one that is must end in the same bits (writes that tell no version)."""
    if cost.forward_seconds < INSIDE_SECONDS:
        return cost
    forward, _ = timed(device, lambda: runner.forward(0, [state], keep_inside=True))
    nbytes = nbytes_of(runner.inside[0])
    record, (found, tape) = timed(device, lambda: runner.record(0, [state]))
    del tape
    if not all(map(same_bits, found.tensors, out.tensors)):
        return cost
    spared = max(0.0, cost.recorded_seconds - record - max(0.0, forward - cost.forward_seconds))
    if spared < INSIDE_SHARE * cost.forward_seconds or not 0 < nbytes <= cost.saved_nbytes:
        return cost
    return replace(cost, inside_nbytes=nbytes, inside_seconds=spared)


def settled(
    runner: Runner, state: State, out: State, cost: StageCost, device: torch.device, *, again: bool
) -> StageCost:
    """The cost with the least seconds of several runs: the first few of a short stage, in which memory is fetched from
    the system and caches fill, take several times as long as the thousands that follow. ``again``: a stage like it has
    been, of another shape, and fewer do."""
    forward, record, backward = cost.forward_seconds, cost.recorded_seconds, cost.backward_seconds
    end = time.perf_counter() + (_AGAIN_SECONDS if again else _SETTLING_SECONDS)
    for _ in range(_MOST_RUNS):
        forward = min(forward, timed(device, lambda: runner.forward(0, [state]))[0])
        seconds, (_, tape) = timed(device, lambda: runner.record(0, [state]))
        record = min(record, seconds)
        run = partial(runner.backward, 0, tape, _cotangents(tape, out), {})
        backward = min(backward, timed(device, run)[0])
        if time.perf_counter() > end:
            break
    return replace(cost, forward_seconds=forward, record_seconds=record, backward_seconds=backward)


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
        seconds, (out, tape) = timed(watch.device, lambda: runner.record(0, [state]))
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


def _measure_backward(runner: Runner, tape: Tape, out: State, watch: MemoryWatch) -> tuple[float, int, int, int]:
    """Seconds of one backward, its transient bytes beyond cotangents and gradients (negative where these are never all
    there beside what it frees), its peak with these, and what lies behind the cotangents that it gives."""
    cotangents = _cotangents(tape, out)
    with watch.measured() as meter:
        seconds, (given, pairs) = timed(watch.device, lambda: runner.backward(0, tape, cotangents, {}))
    made = storages([g for g in (*given, *(g for _, g in pairs)) if g is not None])
    back = [g for g in given if g is not None]
    behind = max(0, sum(storages(back).values()) - sum(map(tensor_nbytes, back)))
    return seconds, meter.peak_nbytes - sum(made.values()), meter.peak_nbytes, behind


def _cotangents(tape: Tape, out: State) -> list[torch.Tensor | None]:
    return [torch.ones_like(t) if takes else None for t, takes in zip(out.tensors, tape.entry.takes, strict=True)]


def measure_skewed(
    stage: Stage, state: State, out: State, traits: Traits, watch: MemoryWatch, snapshot: Snapshot
) -> Skewed | None:
    """What the stage takes when its tokens are all alike; None where it cannot be run on such."""
    state = skewed(state, out)
    try:
        runner = Runner([stage], [traits], watch.device, once=(0,))
        with watch.measured() as meter:
            out = runner.forward(0, [state])
        snapshot.put_back()
        output_nbytes = _made_nbytes(state, out)
        runner = Runner([stage], [traits], watch.device, once=(0,))
        cost, tape = _measure_record(runner, state, output_nbytes, watch)
        _, extra, peak, _ = _measure_backward(runner, tape, out, watch)
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
