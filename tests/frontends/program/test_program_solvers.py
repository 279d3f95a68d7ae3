"""Solvers that run until their tensors say so, and two networks of the spine: the bits of plain PyTorch where stretches
run again."""

from collections.abc import Callable

import pytest
import torch
from side_by_side import compare
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from tapestream.frontends.program.program import Program

SIZE = 24
generator = torch.Generator().manual_seed(0)
BASE = torch.randn(SIZE, SIZE, generator=generator).div(SIZE**0.5).requires_grad_()
RIGHT = torch.randn(SIZE, 4, generator=generator).requires_grad_()
counted: list[int] = []


def conjugate_gradients() -> torch.Tensor:
    """Solves A X = B to a residual, A made of a leaf."""
    a = BASE @ BASE.mT + torch.eye(SIZE)
    x = torch.zeros_like(RIGHT)
    left = direction = RIGHT - a @ x
    before, steps = left.square().sum(0), 0
    while before.max() > 1e-9 and steps < 100:
        along = a @ direction
        length = before / (direction * along).sum(0)
        x, left = x + length * direction, left - length * along
        now = left.square().sum(0)
        direction, before, steps = left + now / before * direction, now, steps + 1
    counted.append(steps)
    return x


def adaptive_steps() -> torch.Tensor:
    """Heun's method inside Euler's: a step is taken again, half as long, where the two differ too much."""
    y, t, h, tries = RIGHT.mT, 0.0, 0.5, 0
    while t < 3.0:
        tries += 1
        k1 = torch.tanh(y @ BASE) - 0.1 * y
        k2 = torch.tanh((y + h * k1) @ BASE) - 0.1 * (y + h * k1)
        error = (0.5 * h * (k2 - k1)).abs().max()
        if error > 0.02 and h > 1e-3:
            h = h / 2
            continue
        y, t = y + 0.5 * h * (k1 + k2), t + h
        h = min(h * (1.5 if error < 0.01 else 1.0), 3.0 - t) or h
    counted.append(tries)
    return y


@pytest.mark.thinned(4)
@pytest.mark.parametrize("planner", ["auto", pytest.param("revolve", marks=pytest.mark.full)])
@pytest.mark.parametrize("solver", [conjugate_gradients, adaptive_steps])
def test_solvers_that_end_by_a_condition_on_tensors(solver: Callable[[], torch.Tensor], planner: str) -> None:
    counted.clear()
    compare(solver, [BASE, RIGHT], lambda: (), calls=4, planner=planner)
    assert set(counted) == {counted[0]}
    assert 8 < counted[0] < 100


class Mixer(nn.Module):
    """Mixes along tokens, then along channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.along = nn.Sequential(
            nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * tokens, tokens)
        )
        self.across = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.along(self.first(x).mT).mT
        return x + self.across(self.second(x))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("planner", ["auto", pytest.param("revolve", marks=pytest.mark.full)])
def test_a_mixer_and_spectral_norms(planner: str, training: bool) -> None:
    """A spectral norm's vectors are buffers that move by themselves while it trains."""
    torch.manual_seed(0)
    blocks = [block for _ in range(6) for block in (Mixer(8, 16), spectral_norm(nn.Linear(16, 16)), nn.Tanh())]
    net = nn.Sequential(*blocks).train(training)
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    compare(net, [x, *net.parameters()], lambda: (x * 1.0,), calls=4, planner=planner, modules=[net])


@pytest.mark.full
def test_numbers_that_left_torch_are_the_same_in_what_runs_again() -> None:
    def program() -> torch.Tensor:
        y = RIGHT
        for _ in range(12):
            y = torch.tanh(BASE @ y)
            scale = torch.tensor(y.detach().abs().mean(1).tolist())[:, None] + y.max().item()
            y = functional.softplus(y * scale) - torch.from_numpy(y.detach().numpy().copy()).abs()
        return y

    run = compare(program, [BASE, RIGHT], lambda: (), calls=4, planner="auto")
    assert isinstance(run, Program)
