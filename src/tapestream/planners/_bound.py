"""Seconds that no schedule of a chain can beat within a device budget, whatever it recomputes or moves."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Budget, Machine, Profile, UniformStages
from tapestream.ir import Tier

DEVICE = Tier.DEVICE


def least_seconds(profile: Profile, budget: Budget | str | int | None = None, machine: Machine | None = None) -> float:
    """A lower bound of the makespan (ours), parameter blocks left out. O(n log n).

    Every stage is recorded and reversed once: B seconds with the turn. Let A be the stages recorded when the turn
    comes. Each other stage has run by then and is recorded after it, so it costs e_i = min(forward, record) more. At
    the turn the device holds for each stage of A the state that its backward reads (nothing else can hold it) and its
    saved tensors, c_i bytes, unless the latter lie below: these went out before the turn and come in after it, so in C
    seconds they are at most K(C) = C * out * in / (out + in) bytes. With m the budget less what is there besides
    (outside bytes, last state and cotangent, the turn), sum of c_i over A <= m + K(C), so C >= B + sum of all e_i - the
    most e_i that fit by this, stages taken in parts. The least such C is found by halving. Links count at their
    full speed in both directions at once, without latency.
    """
    limit = Budget.of(budget).device_nbytes
    if isinstance(profile.stages, UniformStages):
        cost, n = profile.stages.cost, len(profile)
        base = n * (cost.recorded_seconds + cost.backward_seconds) + profile.turn_seconds
    else:
        base = sum(cost.recorded_seconds + cost.backward_seconds for cost in profile.stages) + profile.turn_seconds
    if limit is None:
        return base
    room, moved = _room(profile, limit), _moved_per_second(machine)
    if moved == inf:
        return base
    again, nbytes = _again(profile)
    order = np.argsort(nbytes / np.maximum(again, 1e-300), kind="stable")
    filled = np.append(0.0, np.cumsum(nbytes[order]))
    saved = np.append(0.0, np.cumsum(again[order]))
    low, high = base, base + float(saved[-1])
    for _ in range(60):
        middle = (low + high) / 2
        most = float(np.interp(max(0.0, room + moved * middle), filled, saved))
        low, high = (middle, high) if base + saved[-1] - most > middle else (low, middle)
    return float(low)


def _room(profile: Profile, limit: int) -> int:
    n = len(profile)
    there = profile.outside_nbytes + profile.state_nbytes(n) + profile.cotangent_nbytes(n) + profile.turn_nbytes
    return limit - there


def _moved_per_second(machine: Machine | None) -> float:
    """Bytes that go out and come back in each second, at most; infinite without a machine, copies then being free."""
    if machine is None:
        return inf
    out = sum(link.bytes_per_second for (source, _), link in machine.links.items() if source is DEVICE)
    back = sum(link.bytes_per_second for (_, target), link in machine.links.items() if target is DEVICE)
    return out * back / (out + back) if out and back else 0.0


def _again(profile: Profile) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """e_i and c_i; of equal stages, of which parts may be taken, the sums alone."""
    stages, n = profile.stages, len(profile)
    if isinstance(stages, UniformStages):
        cost = stages.cost
        read = (profile.initial_nbytes + (n - 1) * cost.output_nbytes) * cost.reads_input
        each = n * min(cost.forward_seconds, cost.recorded_seconds)
        return np.array([each]), np.array([float(n * cost.saved_nbytes + read)])
    again = np.array([min(cost.forward_seconds, cost.recorded_seconds) for cost in stages])
    states = (profile.initial_nbytes, *(cost.output_nbytes for cost in stages))
    nbytes = [cost.saved_nbytes + cost.reads_input * state for cost, state in zip(stages, states, strict=False)]
    return again, np.array(nbytes, dtype=np.float64)
