"""Fit a differential equation, and compare its gradient with those of torchdiffeq.

    python examples/loop_ode.py                       # 20,000 Runge-Kutta steps, 1 MiB
    python examples/loop_ode.py --steps 500 --rounds 30

A small network learns the field of a spiral from noisy positions on it. Two solvers, each a step that a Loop repeats:
Runge-Kutta with equal steps, and Dormand-Prince, which chooses its steps and runs until it has reached the last
position. Beside them torchdiffeq, if it is installed: ``odeint`` keeps everything, ``odeint_adjoint`` keeps nothing and
solves another equation backwards in time. Prints memory and error of each gradient; writes a picture. Needs
tapestream[plots].
"""

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import tapestream as ts

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

Adaptive = tuple[Tensor, Tensor, float, float, int]
"""Position, misfit so far, time, length of the next step, number of positions passed."""

# Dormand & Prince 1980: the stages, and what the solutions of order five and four differ by.
STAGES = [
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
DIFFERENCE = [71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40]


class Field(nn.Module):
    """The velocity at a position, shape (.., 2) to (.., 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, y: Tensor) -> Tensor:
        """A spiral turns with the cube of the position, which is up to 8 here: the layers see numbers up to 1."""
        return 8 * self.net(y**3 / 8)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """Positions of shape (times, 2) at equally spaced times, the first at 0."""

    times: Tensor
    positions: Tensor

    @classmethod
    def spiral(cls, count: int, until: float) -> "Task":
        """With a little noise."""
        turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], dtype=torch.float64)
        dt = until / (count - 1) / 200
        y, seen = torch.tensor([2.0, 0.0], dtype=torch.float64), []
        for number in range(200 * (count - 1) + 1):
            if number % 200 == 0:
                seen.append(y)
            y = runge_kutta(lambda y: (y**3) @ turn, y, dt)
        noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return cls(torch.linspace(0, until, count, dtype=torch.float64), torch.stack(seen) + 0.02 * noise)

    def misfit(self, found: Tensor) -> Tensor:
        """The mean square distance of positions found at all times but the first."""
        return (found - self.positions[1:]).square().sum() / len(self.positions)


def runge_kutta(field: Callable[[Tensor], Tensor], y: Tensor, dt: float) -> Tensor:
    """One step of order four."""
    a = field(y)
    b = field(y + dt / 2 * a)
    c = field(y + dt / 2 * b)
    d = field(y + dt * c)
    return y + dt / 6 * (a + 2 * b + 2 * c + d)


def equal_steps(field: Field, task: Task, steps: int, budget: str) -> Callable[[], Tensor]:
    """The misfit by Runge-Kutta with about so many steps."""
    between = max(1, steps // (len(task.times) - 1))
    dt = float(task.times[1]) / between

    def step(y: Tensor) -> tuple[Tensor, Tensor]:
        y = runge_kutta(field, y, dt)
        return y, y

    run = ts.Loop(step, budget=budget)

    def misfit() -> Tensor:
        _, found = run(task.positions[0], between * (len(task.times) - 1), outputs="stack", every=between)
        return task.misfit(found)

    return misfit


def adaptive_step(field: Field, task: Task, tolerance: float) -> Callable[[Adaptive], Adaptive]:
    """A step of Dormand-Prince: no further than the next position, and none where the error is too large."""
    times = task.times.tolist()

    def step(state: Adaptive) -> Adaptive:
        y, misfit, t, length, passed = state
        dt = min(length, times[passed + 1] - t)
        slopes = [field(y)]
        for weights in STAGES:
            new = y + dt * sum(w * k for w, k in zip(weights, slopes, strict=True) if w)
            slopes.append(field(new))
        with torch.no_grad():
            wrong = dt * sum(w * k for w, k in zip(DIFFERENCE, slopes, strict=True) if w)
            allowed = tolerance * (1 + torch.maximum(y.abs(), new.abs()))
            error = float((wrong / allowed).square().mean().sqrt())
        factor = min(5.0, max(0.2, 0.9 * max(error, 1e-9) ** -0.2))
        if error > 1:
            return y, misfit, t, dt * factor, passed
        if t + dt < times[passed + 1] - 1e-9:
            return new, misfit, t + dt, dt * factor, passed
        gap = (new - task.positions[passed + 1]).square().sum() / len(times)
        return new, misfit + gap, times[passed + 1], max(length, dt * factor), passed + 1

    return step


def adaptively(field: Field, task: Task, tolerance: float, budget: str) -> Callable[..., Tensor]:
    """The misfit by Dormand-Prince at all positions, or the first few: how many steps it takes is known when it has
    ended."""
    run = ts.Loop(adaptive_step(field, task, tolerance), budget=budget)

    def misfit(positions: int = len(task.times) - 1) -> Tensor:
        # Which parts of a state carry a gradient is seen in the first steps: this one will only later.
        nothing = torch.zeros((), dtype=torch.float64, requires_grad=True)
        start: Adaptive = (task.positions[0], nothing, 0.0, 0.01, 0)
        last: Adaptive = run(start, until=lambda state: state[4] == positions, max_steps=1_000_000)
        return last[1]

    return misfit


def solvers(field: Field, task: Task, given: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """By name, what computes the misfit."""
    found = {
        "Runge-Kutta, Loop": equal_steps(field, task, given.steps, given.budget),
        "Dormand-Prince, Loop": adaptively(field, task, given.tolerance, given.budget),
    }
    if importlib.util.find_spec("torchdiffeq") is None:
        print("torchdiffeq is not installed (pip install torchdiffeq): nothing to compare with")
        return found
    peer = importlib.import_module("torchdiffeq")

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = field

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return field(y)

    timed, accuracy = Timed(), {"rtol": given.tolerance, "atol": given.tolerance}
    between = max(1, given.steps // (len(task.times) - 1))
    fixed = {"method": "rk4", "options": {"step_size": float(task.times[1]) / between}}
    start, times = task.positions[0], task.times
    found |= {
        "Runge-Kutta, odeint": lambda: task.misfit(peer.odeint(timed, start, times, **fixed)[1:]),
        "Dormand-Prince, odeint": lambda: task.misfit(peer.odeint(timed, start, times, **accuracy)[1:]),
        "Dormand-Prince, odeint_adjoint": lambda: task.misfit(peer.odeint_adjoint(timed, start, times, **accuracy)[1:]),
    }
    return found


def gradient(field: Field, misfit: Callable[[], Tensor]) -> Tensor:
    """By all parameters, as one vector."""
    return torch.cat([g.ravel() for g in torch.autograd.grad(misfit(), list(field.parameters()))])


def compare(field: Field, task: Task, given: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """By solver: the relative error of the gradient of the misfit, and the bytes that it took."""
    exact = gradient(field, equal_steps(field, task, 4 * given.steps, given.budget))
    found = {}
    for name, misfit in solvers(field, task, given).items():
        error = float((gradient(field, misfit) - exact).norm() / exact.norm())
        began = time.perf_counter()
        with ts.track_memory() as meter:  # a first call measures its step, which cannot be done in here
            gradient(field, misfit)
        found[name] = error, meter.peak_nbytes
        seconds = time.perf_counter() - began
        print(f"{name:32} error {error:.1e}  {meter.peak_nbytes / 2**20:8.2f} MiB  {seconds:.1f} s", flush=True)
    return found


def main(arguments: list[str] | None = None) -> tuple[list[float], dict[str, tuple[float, int]]]:
    """Fit and compare as the command line says; returns the misfits and what `compare` found."""
    given = parser().parse_args(arguments)
    torch.manual_seed(0)
    task, field = Task.spiral(given.positions, given.until), Field(given.width).double()
    optimizer = torch.optim.Adam(field.parameters(), lr=given.lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.rounds)
    solve, misfits = adaptively(field, task, given.tolerance, given.budget), list[float]()
    last = given.positions - 1
    for number in range(given.rounds):
        optimizer.zero_grad()
        # Fitted from the start on, a little further every few rounds: a spiral fitted all at once becomes its mean.
        solve(min(last, 1 + 2 * last * number // given.rounds)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(field.parameters(), 1.0)
        optimizer.step()
        slower.step()
        with torch.no_grad():
            misfits.append(solve().item())
        if number % max(1, given.rounds // 10) == 0 or number == given.rounds - 1:
            print(f"round {number + 1}/{given.rounds}  misfit {misfits[-1]:.4f}", flush=True)
    found = compare(field, task, given)
    draw(field, task, misfits, found, given)
    return misfits, found


def draw(
    field: Field, task: Task, misfits: list[float], found: dict[str, tuple[float, int]], given: argparse.Namespace
) -> None:
    """The trajectory, the misfit by round, and error against memory."""
    path, y = [], task.positions[0]
    with torch.no_grad():
        for _ in range(2000):
            path.append(y)
            y = runge_kutta(field, y, given.until / 2000)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    axes[0].plot(*torch.stack(path).T.numpy(), label="fitted")
    axes[0].plot(*task.positions.T.numpy(), "k.", label="seen")
    axes[0].legend()
    axes[1].semilogy(range(1, len(misfits) + 1), misfits)
    axes[1].set(xlabel="round", ylabel="misfit")
    axes[1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for name, (error, nbytes) in found.items():
        axes[2].loglog(nbytes / 2**20, max(error, 1e-16), "o", label=name)
    axes[2].set(xlabel="MiB", ylabel="relative error of the gradient")
    axes[2].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes[2].xaxis.set_major_formatter("{x:g}")
    axes[2].xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[2].legend(fontsize=7)
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "loop_ode.png", dpi=120)
    pyplot.close(figure)
    print(f"written: {given.out / 'loop_ode.png'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("runs"), help="where the picture goes (%(default)s)")
    made.add_argument("--budget", default="1MiB", help="bytes for restart checkpoints and tape (%(default)s)")
    made.add_argument("--until", type=float, default=5.0, help="the last time (%(default)s)")
    made.add_argument("--tolerance", type=float, default=1e-6, help="of Dormand-Prince (%(default)s)")
    made.add_argument("--lr", type=float, default=0.02, help="%(default)s")
    for name, value in {"steps": 20_000, "positions": 101, "width": 32, "rounds": 300}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
