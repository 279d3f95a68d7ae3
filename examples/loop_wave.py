"""Recover the speed of sound between two wells from recordings: 2-D full-waveform inversion.

    python examples/loop_wave.py                     # 10,000 time steps on an 80 x 80 grid
    python examples/loop_wave.py --steps 500 --size 40 --rounds 10

Pulses set off in one well are recorded in the other, behind a slow body. Starting from a uniform medium, the misfit to
these recordings falls by quasi-Newton steps on the speed in every cell; each gradient goes through all time steps of
the acoustic wave equation. Writes a picture of the media and the misfit. Needs tapestream[plots].
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

import tapestream as ts

matplotlib.use("Agg")
from matplotlib import pyplot

Wave = tuple[Tensor, Tensor]
PERIOD = 8.0
"""Of the pulse: the time in which sound crosses as many cells at speed 1."""


def main(arguments: list[str] | None = None) -> list[float]:
    """Invert as the command line says; returns the misfits."""
    given = parser().parse_args(arguments)
    true, speed = buried(given.size), torch.full((given.size, given.size), 1.0)
    speed.requires_grad_()
    with torch.no_grad():
        recorded = recordings(true, given)
    optimizer = torch.optim.LBFGS([speed], max_iter=1, max_eval=8, line_search_fn="strong_wolfe")
    misfits: list[float] = []

    def misfit() -> Tensor:
        optimizer.zero_grad()
        found = (recordings(speed, given) - recorded).square().sum() / recorded.square().sum()
        found.backward()
        assert speed.grad is not None
        speed.grad *= between(given.size)
        return found.detach()

    for number in range(given.rounds):
        began = time.perf_counter()
        misfits.append(float(optimizer.step(misfit)))
        seconds = time.perf_counter() - began
        print(f"round {number + 1}/{given.rounds}  misfit {misfits[-1]:.5f}  {seconds:.1f} s", flush=True)
    draw(true, speed.detach(), misfits, given.out)
    return misfits


def buried(size: int) -> Tensor:
    """A medium of speed 1 with a slow body in it."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return 1.0 - 0.15 * torch.exp(-(((y - 0.45 * size) ** 2 + (x - 0.5 * size) ** 2) / (0.12 * size) ** 2))


def margin(size: int) -> int:
    """Cells along the border where waves are swallowed. The wells stand next to them."""
    return size // 8


def between(size: int) -> Tensor:
    """1 in the cells between the wells, where the speed is sought, 0 elsewhere."""
    cells = torch.zeros(size, size)
    near = margin(size) + 2
    cells[near:-near, near:-near] = 1.0
    return cells


def recordings(speed: Tensor, given: argparse.Namespace) -> Tensor:
    """Pressure in the right well about once in unit time, for all sources at once: (times, sources, depths)."""
    size, edge = given.size, margin(given.size)
    dt = min(0.5, 2.5 * size / given.steps)
    pulse = torch.zeros(given.sources, size, size)
    for number in range(given.sources):
        pulse[number, edge + (2 * number + 1) * (size - 2 * edge) // (2 * given.sources), edge] = 1.0
    run = ts.Loop(wave_step(speed, pulse, dt), budget=given.budget)
    still = torch.zeros(given.sources, size, size)
    _, out = run((still, still), inputs=ricker(given.steps, dt), outputs="stack", every=max(1, round(1 / dt)))
    return out  # type: ignore[no-any-return]


def wave_step(speed: Tensor, pulse: Tensor, dt: float) -> Callable[[Wave, Tensor], tuple[Wave, Tensor]]:
    """Second order in time and space; a sponge along the border swallows what leaves.

    What depends on the speed alone is computed once, before the loop: its gradient arrives there all the same.
    """
    size, edge = speed.shape[0], margin(speed.shape[0])
    courant = (speed * dt).square()
    depth = torch.minimum(torch.arange(size), size - 1 - torch.arange(size)).clamp(max=edge)
    sponge = torch.exp(-dt * ((edge - depth) / edge).square())
    sponge = torch.minimum(sponge[:, None], sponge[None, :])
    stencil = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]

    def step(state: Wave, amplitude: Tensor) -> tuple[Wave, Tensor]:
        u, before = state
        bent = torch.nn.functional.conv2d(u[:, None], stencil, padding=1)[:, 0]
        after = (2 * u - before + courant * bent + dt * dt * amplitude * pulse) * sponge
        return (after, u * sponge), after[:, edge:-edge, -edge - 1]

    return step


def ricker(steps: int, dt: float) -> Tensor:
    """A pulse in time, one value per step."""
    t = (torch.arange(steps) * dt - 1.5 * PERIOD) * math.pi / PERIOD
    return (1 - 2 * t * t) * torch.exp(-t * t)


def draw(true: Tensor, found: Tensor, misfits: list[float], out: Path) -> None:
    """The medium, the one recovered, and the misfit by round."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
    for axis, medium, title in ((axes[0], true, "true speed"), (axes[1], found, "recovered")):
        image = axis.imshow(medium.numpy(), vmin=0.82, vmax=1.05, cmap="viridis")
        axis.set(title=title)
    figure.colorbar(image, ax=list(axes[:2]), shrink=0.8)
    axes[2].semilogy(range(1, len(misfits) + 1), misfits)
    axes[2].set(xlabel="round", ylabel="relative misfit")
    axes[2].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "loop_wave.png", dpi=120)
    pyplot.close(figure)
    print(f"written: {out / 'loop_wave.png'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("runs"), help="where the picture goes (%(default)s)")
    made.add_argument("--budget", default="64MiB", help="bytes for restart checkpoints and tape (%(default)s)")
    for name, value in {"steps": 10_000, "size": 80, "sources": 6, "rounds": 20}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
