"""Differentiate a particle simulation with neighbour lists through all of its steps, as it is written.

    python examples/program_particles.py              # 1,000 particles, 200 steps, 40 rounds, 12 MiB
    python examples/program_particles.py --particles 100 --steps 40 --rounds 5 --budget 450KiB

Particles drift, push each other away when they touch, and are to arrive as two rings. Which of them touch depends on
where they are, so each step has other pairs, and every few steps the list of neighbours is made anew: no chain, no loop
of equal steps. The gradient by all first velocities goes through every step within the budget, and equals plain
autograd's to the last bit. Prints what is kept; writes pictures. Needs tapestream[plots].
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

import tapestream as ts

matplotlib.use("Agg")
from matplotlib import pyplot

RADIUS = SKIN = 0.025  # neighbours are listed up to this much further away
DT = 0.02


def neighbours(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs that may touch before the list is made anew: indices, each pair once."""
    with torch.no_grad():
        near = torch.cdist(positions, positions) < RADIUS + SKIN
        return near.triu(1).nonzero(as_tuple=True)  # type: ignore[return-value]


def simulated(positions: Tensor, velocities: Tensor, steps: int) -> list[Tensor]:
    """Positions, shape (particles, 2), before the first step and after each."""
    path = [positions]
    listed_at, (first, second) = positions, neighbours(positions)
    for _ in range(steps):
        if (positions - listed_at).detach().abs().max() > SKIN / 2:
            listed_at, (first, second) = positions, neighbours(positions)
        apart = positions[first] - positions[second]
        distance = apart.square().sum(1, keepdim=True).add(1e-12).sqrt()
        push = 1.0 * (RADIUS - distance).clamp(min=0) * apart / distance
        force = torch.zeros_like(positions).index_add(0, first, push).index_add(0, second, -push)
        velocities = 0.995 * velocities + DT * force
        positions = positions + DT * velocities
        path.append(positions)
    return path


def rings(count: int) -> Tensor:
    """Points on two rings, the wanted last positions."""
    angles = torch.arange(count) * (2 * math.pi / count)
    circle = torch.stack((angles.cos(), angles.sin()), 1)
    return torch.where(torch.arange(count)[:, None] % 2 == 0, 1.2 * circle, 0.6 * circle)


def misfit(positions: Tensor, velocities: Tensor, wanted: Tensor, steps: int) -> Tensor:
    """How far each particle ends from the rings, and each of their points from a particle; mean squares."""
    last = simulated(positions, velocities, steps)[-1]
    squares = (last[:, None] - wanted).square().sum(2)
    return squares.min(0).values.mean() + squares.min(1).values.mean()


def measured(value: Callable[..., Tensor], positions: Tensor, velocities: Tensor, *rest: object) -> tuple[Tensor, int]:
    """The gradient by the velocities, and the most bytes that were live."""
    with ts.track_memory() as meter:
        (gradient,) = torch.autograd.grad(value(positions, velocities, *rest), velocities)
    return gradient, meter.peak_nbytes


def main(arguments: list[str] | None = None) -> tuple[list[float], int, int]:
    """Fit as the command line says; returns the misfits, and the peaks of plain PyTorch and of the program."""
    given = parser().parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(given.particles, 2, generator=generator) - 0.5
    velocities = torch.zeros_like(positions).requires_grad_()
    wanted, run = rings(100), ts.Program(misfit, budget=given.budget)

    optimizer, misfits = torch.optim.Adam([velocities], lr=given.lr), list[float]()
    for number in range(given.rounds):
        optimizer.zero_grad()
        loss = run(positions, velocities, wanted, given.steps)
        loss.backward()
        optimizer.step()
        misfits.append(loss.item())
        if number % max(1, given.rounds // 10) == 0 or number == given.rounds - 1:
            print(f"round {number + 1}/{given.rounds}  misfit {misfits[-1]:.4f}", flush=True)

    plain, stored = measured(misfit, positions, velocities, wanted, given.steps)
    ours, held = measured(run, positions, velocities, wanted, given.steps)
    same = "the same bits" if torch.equal(plain, ours) else "OTHER BITS"
    print(f"gradient: plain PyTorch {stored / 2**20:.2f} MiB, here {held / 2**20:.2f} MiB, {same}")
    explanation = run.explain(positions, velocities, wanted, given.steps)
    print(explanation)
    given.out.mkdir(parents=True, exist_ok=True)
    explanation.plot(given.out / "program_particles_memory.png")
    draw(positions, velocities.detach(), wanted, misfits, given)
    return misfits, stored, held


def draw(
    positions: Tensor, velocities: Tensor, wanted: Tensor, misfits: list[float], given: argparse.Namespace
) -> None:
    """Where the particles are at the beginning, half way and at the end, and the misfit by round."""
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
    path = simulated(positions, velocities, given.steps)
    for axis, number in zip(axes, (0, given.steps // 2, given.steps), strict=False):
        axis.plot(*wanted.T.numpy(), ".", color="0.8", markersize=3)
        axis.plot(*path[number].T.numpy(), ".", markersize=4)
        axis.set(title=f"after {number} steps", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
    axes[3].semilogy(range(1, len(misfits) + 1), misfits)
    axes[3].set(xlabel="round", ylabel="misfit")
    axes[3].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.savefig(given.out / "program_particles.png", dpi=120)
    pyplot.close(figure)
    print(f"written: {given.out / 'program_particles.png'}, {given.out / 'program_particles_memory.png'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("runs"), help="where the pictures go (%(default)s)")
    made.add_argument("--budget", default="12MiB", help="bytes for restart checkpoints and tape (%(default)s)")
    made.add_argument("--lr", type=float, default=0.03, help="%(default)s")
    for name, value in {"particles": 1000, "steps": 200, "rounds": 40}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
