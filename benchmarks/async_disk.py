"""Claim: with states that go to disk while computing, ten times the steps take ten times the seconds, and no more.

A chain of n equal steps, differentiated with few states in RAM: `async_multistage` at the interval derived from the
measured disk and step, at n and at 10 n, in turn with Revolve at the same number of states in RAM; with all states to
disk and nothing run more than twice (`offload`); and at half the least interval that hides copies, where these take
longer than what they hide behind; and a `tapestream.Loop` of n and 10 n such steps. These are run. Longer chains, of 10
n and 100 n such steps, are simulated with the seconds and links measured, and their rows say so. What has n steps is
run ten times in a row, since a machine that is busy for long may slow down. Some ten minutes on a quiet machine;
``--full``: larger states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.common import Row, Settings, Timings, alternate, mebibytes, save, settings, yes
from tapestream.costs import Machine, Profile, StageCost, UniformStages
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.planners._tiers import Store
from tapestream.planners.async_multistage import hiding, intervals
from tapestream.simulate import simulate

TITLE = "Seconds per step at n and 10 n steps, states to disk while computing, against Revolve at the same slots"
_ASYNC, _REVOLVE, _OFFLOAD = "async, n", "Revolve, n", "offload alone, n"
_HALF = "async, n, half of what hides copies"
_TIMES = 10  # as many runs of n steps as have the steps of a long one
_PROFILES = 10  # of which the fastest counts, as a moment in which the machine is busy would shorten the interval
_SLOTS = 6  # restart checkpoints in RAM inside an interval; the copy on its way is one more


@dataclass(frozen=True, slots=True)
class Sizes:
    """``steps`` is n; a state is ``rows`` x 256 numbers of 4 bytes; each step multiplies a state ``repeats`` times."""

    steps: int
    rows: int
    repeats: int


class Step(nn.Module):
    """One step of an iteration."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        """The next state, of the same shape."""
        for _ in range(self.repeats):
            x = x - 1e-5 * x * x  # so little that 10,000 steps leave states and gradients far from slow numbers
        return x


def main() -> None:
    """Measure the disk below ``--folder``, then every contender in turn."""
    chosen = settings("cpu", rounds=7, full="states of 4 MiB, 20 GB on the disk, an hour")
    sizes = Sizes(60, 16, 1) if chosen.quick else Sizes(1000, 4096, 1) if chosen.full else Sizes(1000, 1024, 1)
    save("async_disk", TITLE, chosen, _rows(sizes, chosen), states_in_ram=_SLOTS + 1, state_MiB=sizes.rows / 1024)


def _rows(sizes: Sizes, chosen: Settings) -> list[Row]:
    machine = ts.measure_machine("cpu", chosen.folder)
    x = torch.randn(sizes.rows, 256)
    short, long = sizes.steps, _TIMES * sizes.steps
    interval, half = _intervals(sizes, x, machine)
    chains = {
        _ASYNC: _chain(short, sizes, chosen, machine, interval),
        _long(_ASYNC): _chain(long, sizes, chosen, machine, interval),
        _REVOLVE: _revolve(short, sizes),
        _long(_REVOLVE): _revolve(long, sizes),
        _OFFLOAD: _offload(short, sizes, chosen, machine),
        **({_HALF: _chain(short, sizes, chosen, machine, half)} if half else {}),
    }  # what is compared runs one after the other
    found: dict[str, Tensor] = {}
    waited: dict[str, list[float]] = {name: [] for name in chains}
    runs = {name: _noting(name, chain, _step(chain, x), waited[name], found) for name, chain in chains.items()}
    runs |= {name: _repeated(run) for name, run in runs.items() if len(chains[name].stages) == short}
    for chain in chains.values():
        chain(x.clone().requires_grad_())  # profiled, planned, files made: every timed call finds that done
    timings = alternate(runs, chosen.rounds, "cpu", warm=0)
    rows = {name: _row(name, chain, timings, waited[name]) for name, chain in chains.items()}
    for way in (_ASYNC, _REVOLVE):
        rows[_long(way)] |= _growth(timings, _long(way), way)
    _judge(rows, timings, interval, half)
    pairs = ((_long(_ASYNC), _long(_REVOLVE)), (_ASYNC, _REVOLVE), (_OFFLOAD, _REVOLVE), (_HALF, _REVOLVE))
    for name, other in pairs:
        if name in rows:
            rows[name]["same bits as Revolve"] = yes(torch.equal(found[name], found[other]))
    looped = _looped(sizes, x, chosen, machine, interval)
    return [*rows.values(), *looped, *_simulated(sizes, _profile(sizes, x).stages[1], machine, interval)]


def _looped(sizes: Sizes, x: Tensor, chosen: Settings, machine: Machine, interval: int) -> Iterator[Row]:
    """Loops of n and 10 n steps, in turn."""
    loops = {
        steps: ts.Loop(
            Step(sizes.repeats), folder=chosen.folder, machine=machine, planner="async_multistage", slots=_SLOTS,
            interval=interval, chunk=1,
        )
        for steps in (sizes.steps, _TIMES * sizes.steps)
    }  # fmt: skip
    runs: dict[str, Callable[[], object]]
    runs = {str(steps): partial(_gradient, partial(loop, steps=steps), x) for steps, loop in loops.items()}
    for steps, loop in loops.items():
        loop(x.clone().requires_grad_(), steps=steps)  # as above
    runs[str(sizes.steps)] = _repeated(runs[str(sizes.steps)])
    timings = alternate(runs, chosen.rounds, "cpu", warm=0)
    for steps, loop in loops.items():
        assert loop.plan is not None
        row: Row = {
            "contender": f"Loop, async, {steps // sizes.steps} n", "how": "run", "steps": steps,
            "us per step": round(timings.seconds(str(steps)) / (_TIMES * sizes.steps) * 1e6, 2),
            "forwards per step": round(loop.plan.simulation.forwards / steps, 3),
            "MiB to disk": mebibytes(loop.plan.simulation.bytes_moved.get((Tier.DEVICE, Tier.DISK), 0)),
        }  # fmt: skip
        if steps > sizes.steps:
            row |= _growth(timings, str(steps), str(sizes.steps))
            row |= {"claim": "per step at most 1.05", "met": yes(row["per step, over that at n"] <= 1.05)}
        yield row


def _repeated(run: Callable[[], object]) -> Callable[[], None]:
    """As often as makes as many steps as a long run has."""

    def runs() -> None:
        for _ in range(_TIMES):
            run()

    return runs


def _growth(timings: Timings, name: str, reference: str) -> Row:
    """By the clock and of the processor: a disk or a host that others use, too, shows in the difference."""
    found = timings.ratio(name, reference)
    return {
        "per step, over that at n": found["ratio"], "processor, over that at n": found["ratio of processor time"]
    }  # fmt: skip


def _gradient(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of the sum, by the first state."""
    (found,) = torch.autograd.grad(run(start := x.clone().requires_grad_()).sum(), start)
    return found


def _simulated(sizes: Sizes, step: StageCost, machine: Machine, interval: int) -> Iterator[Row]:
    """The judge's seconds per step at 10 n and 100 n equal steps; nothing of it is run."""
    ways: dict[str, dict[str, int]] = {
        "async_multistage": {"slots": _SLOTS, "interval": interval}, "revolve": {"slots": _SLOTS + 1},
    }  # fmt: skip
    for planner, knobs in ways.items():
        each: list[float] = []
        for factor in (10, 100):
            profile = Profile(UniformStages(step, factor * sizes.steps), step.output_nbytes)
            judged = simulate(planners[planner](profile, None, machine, **knobs), profile, machine)
            each.append(judged.makespan_seconds / len(profile))
            row: Row = {
                "contender": f"{planner}, {factor} n", "how": "simulated", "steps": len(profile),
                "simulated us per step": round(each[-1] * 1e6, 2),
                "forwards per step": round(judged.forwards / len(profile), 3),
                "simulated waiting": round(judged.stall_seconds / judged.makespan_seconds, 4),
            }  # fmt: skip
            if factor == 100:
                growth, is_async = each[1] / each[0], planner == "async_multistage"
                row |= {
                    "per step, over that at 10 n": round(growth, 4),
                    "claim": "per step at most 1.05" if is_async else "per step more than 1.05",
                    "met": yes((growth <= 1.05) is is_async),
                }  # fmt: skip
            yield row


def _long(name: str) -> str:
    return name.replace(", n", ", 10 n")


def _judge(rows: dict[str, Row], timings: Timings, interval: int, half: int) -> None:
    """The claims, each beside what was measured for it; an interval of 1 has no half."""
    better = min(_REVOLVE, _OFFLOAD, key=timings.seconds)
    over = timings.ratio(_ASYNC, better)["ratio"]
    stalls = rows[_ASYNC]["waiting for copies"]
    per_step, growth = (rows[_long(way)]["per step, over that at n"] for way in (_ASYNC, _REVOLVE))
    rows[_ASYNC] |= {
        "interval": interval, "over the better of Revolve and offload": over,
        "claim": "waits at most 5%, at most 5% slower than the better", "met": yes(stalls <= 0.05 and over <= 1.05),
    }  # fmt: skip
    rows[_long(_ASYNC)] |= {"claim": "per step at most 1.05", "met": yes(per_step <= 1.05)}
    rows[_long(_REVOLVE)] |= {"claim": "per step more than 1.05", "met": yes(growth > 1.05)}
    if half:
        halved = rows[_HALF]["waiting for copies"]
        rows[_HALF] |= {"interval": half, "claim": "waits more than 5%", "met": yes(halved > 0.05)}


def _intervals(sizes: Sizes, x: Tensor, machine: Machine) -> tuple[int, int]:
    """What the planner derives from the profile of one step and the measured disk, and half of the least that hides."""
    store = Store.of("async_disk", Tier.DISK, x.nbytes, machine)
    found = (_profile(sizes, x).stages[1] for _ in range(_PROFILES))
    cost = min(found, key=lambda cost: cost.forward_seconds)
    return next(intervals(sizes.steps, _SLOTS, cost, store)), hiding(cost, store) // 2


def _profile(sizes: Sizes, x: Tensor) -> Profile:
    chain = ts.Chain([Step(sizes.repeats)] * 8, planner="store_all")
    _step(chain, x)()
    assert chain.plan is not None
    return chain.plan.profile


def _chain(steps: int, sizes: Sizes, chosen: Settings, machine: Machine, interval: int) -> ts.Chain:
    return ts.Chain(
        [Step(sizes.repeats)] * steps, folder=chosen.folder, machine=machine, planner="async_multistage",
        slots=_SLOTS, interval=interval,
    )  # fmt: skip


def _offload(steps: int, sizes: Sizes, chosen: Settings, machine: Machine) -> ts.Chain:
    """Every state to the disk, nothing run more than twice."""
    return ts.Chain(
        [Step(sizes.repeats)] * steps, folder=chosen.folder, machine=machine, planner="offload", tail=_SLOTS, ahead=2
    )


def _revolve(steps: int, sizes: Sizes) -> ts.Chain:
    return ts.Chain([Step(sizes.repeats)] * steps, planner="revolve", slots=_SLOTS + 1)


def _step(chain: ts.Chain, x: Tensor) -> Callable[[], Tensor]:
    """Forward and backward as a function that returns the gradient of the first state."""
    return partial(_gradient, chain, x)


def _noting(
    name: str, chain: ts.Chain, step: Callable[[], Tensor], waited: list[float], found: dict[str, Tensor]
) -> Callable[[], None]:
    """``step``, noting the gradient and the seconds for which it waited for copies."""

    def run() -> None:
        before = chain.copies.wait_seconds
        found[name] = step()
        waited.append(chain.copies.wait_seconds - before)

    return run


def _row(name: str, chain: ts.Chain, timings: Timings, waited: list[float]) -> Row:
    plan, seconds = chain.plan, timings.seconds(name)
    assert plan is not None
    n, simulation = len(plan.profile), plan.simulation
    runs = len(waited) // len(timings.wall[name])  # of which one timing consists
    stalls = sum(waited) / sum(timings.wall[name])
    return {
        "contender": name, "how": "run", "steps": n, "us per step": round(seconds / runs / n * 1e6, 2),
        "simulated us per step": round(plan.seconds / n * 1e6, 2),
        "forwards per step": round(simulation.forwards / n, 3),
        "MiB in RAM, simulated": mebibytes(plan.peak_nbytes),
        "MiB to disk": mebibytes(simulation.bytes_moved.get((Tier.DEVICE, Tier.DISK), 0)),
        "waiting for copies": round(stalls, 4),
        "simulated waiting": round(simulation.stall_seconds / plan.seconds, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
