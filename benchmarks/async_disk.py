"""Claim: with states that go to disk while computing, ten times the steps take ten times the seconds, and no more.

A chain of n equal steps, differentiated with few states in RAM: `async_multistage` at the interval derived from the
measured disk and step, at n and at 10 n, in turn with Revolve at the same number of states in RAM; and once at half
that interval, where copies take longer than what they hide behind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.common import Row, Settings, Timings, alternate, mebibytes, save, settings, yes
from tapestream.costs import Machine, Profile
from tapestream.ir import Tier
from tapestream.planners._tiers import Store
from tapestream.planners.async_multistage import hiding

TITLE = "Seconds per step at n and 10 n steps, states to disk while computing, against Revolve at the same slots"
_SLOTS = 4  # restart checkpoints in RAM inside an interval; the copy on its way is one more


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
            x = x + 0.01 * torch.sin(x)
        return x


def main() -> None:
    """Measure the disk below ``--folder``, then every contender in turn."""
    chosen = settings("cpu", rounds=5)
    sizes = Sizes(60, 16, 1) if chosen.quick else Sizes(1000, 256, 3)
    save("async_disk", TITLE, chosen, _rows(sizes, chosen), states_in_ram=_SLOTS + 1, state_MiB=sizes.rows / 1024)


def _rows(sizes: Sizes, chosen: Settings) -> list[Row]:
    machine = ts.measure_machine("cpu", chosen.folder)
    x = torch.randn(sizes.rows, 256)
    short, long = sizes.steps, 10 * sizes.steps
    interval = _interval(sizes, x, machine)
    chains = {"async, n": _chain(short, sizes, chosen, machine, interval)}
    chains["async, 10 n"] = _chain(long, sizes, chosen, machine, interval)
    chains["Revolve, n"] = _revolve(short, sizes)
    chains["Revolve, 10 n"] = _revolve(long, sizes)
    if interval > 1:
        chains["async, n, half the interval"] = _chain(short, sizes, chosen, machine, interval // 2)
    gradients = {name: _step(chain, x)() for name, chain in chains.items()}
    waited: dict[str, list[float]] = {name: [] for name in chains}
    runs = {name: _waiting(chain, _step(chain, x), waited[name]) for name, chain in chains.items()}
    timings = alternate(runs, chosen.rounds, "cpu", warm=0)
    rows = [_row(name, chain, timings, waited[name]) for name, chain in chains.items()]
    for row, way in ((rows[1], "async"), (rows[3], "Revolve")):
        row["per step, over that at n"] = round(timings.ratio(f"{way}, 10 n", f"{way}, n")["ratio"] / 10, 4)
    rows[1] |= {"claim": "at most 1.05", "met": yes(rows[1]["per step, over that at n"] <= 1.05)}
    equal = [torch.equal(gradients[f"async, {n}"], gradients[f"Revolve, {n}"]) for n in ("n", "10 n")]
    rows[1]["same bits as Revolve"] = yes(all(equal))
    return rows


def _interval(sizes: Sizes, x: Tensor, machine: Machine) -> int:
    """The least that hides a copy, by the profile of one step and the measured disk."""
    profile = _profile(sizes, x)
    return hiding(profile.stages[1], Store.of("async_disk", Tier.DISK, x.nbytes, machine))


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


def _revolve(steps: int, sizes: Sizes) -> ts.Chain:
    return ts.Chain([Step(sizes.repeats)] * steps, planner="revolve", slots=_SLOTS + 1)


def _step(chain: ts.Chain, x: Tensor) -> Callable[[], Tensor]:
    """Forward and backward as a function that returns the gradient of the first state."""

    def step() -> Tensor:
        (found,) = torch.autograd.grad(chain(start := x.clone().requires_grad_()).sum(), start)
        return found

    return step


def _waiting(chain: ts.Chain, step: Callable[[], Tensor], waited: list[float]) -> Callable[[], None]:
    """``step``, noting the seconds for which it waited for copies."""

    def run() -> None:
        before = chain.copies.wait_seconds
        step()
        waited.append(chain.copies.wait_seconds - before)

    return run


def _row(name: str, chain: ts.Chain, timings: Timings, waited: list[float]) -> Row:
    plan, seconds = chain.plan, timings.seconds(name)
    assert plan is not None
    n, simulation = len(plan.profile), plan.simulation
    stalls = sorted(w / s for w, s in zip(waited, timings.wall[name], strict=True))[len(waited) // 2]
    return {
        "contender": name, "steps": n, "us per step": round(seconds / n * 1e6, 2),
        "simulated us per step": round(plan.seconds / n * 1e6, 2),
        "forwards per step": round(simulation.forwards / n, 3),
        "MiB in RAM, simulated": mebibytes(plan.peak_nbytes),
        "MiB to disk": mebibytes(simulation.bytes_moved.get((Tier.DEVICE, Tier.DISK), 0)),
        "waiting for copies": round(stalls, 4),
        "simulated waiting": round(simulation.stall_seconds / plan.seconds, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
