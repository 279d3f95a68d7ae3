"""Where programs are cut into stretches, and what these take."""

import pytest
import torch
from torch import nn

from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.program import Program
from tapestream.storage.meter import track_memory

WIDTH, ROWS = 64, 256
LAYER = WIDTH * WIDTH * 4  # bytes of the gradient of a layer of one width


class Residual(nn.Module):
    """Saves little at its borders and much inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def borders_of(net: nn.Module, x: torch.Tensor) -> Borders:
    """Of a call of ``net``, whose gradients count."""
    program, found = Program(net, gradients_within=True, budget="1GiB"), []
    made = program._borders
    program._borders = lambda sweep: found.append(made(sweep)) or found[-1]  # type: ignore[assignment, func-returns-value]
    program(x).sum().backward()
    return found[-1]


def largest(borders: Borders, cuts: list[int]) -> int:
    return max(cost.saved_nbytes for cost in borders.profile(cuts).stages)


def test_the_number_of_stretches_suits_the_blocks_that_come_again() -> None:
    blocks = 20
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(Residual() for _ in range(blocks)), nn.Linear(WIDTH, 8))
    borders = borders_of(net, torch.randn(ROWS, WIDTH))
    one = largest(borders_of(Residual(), torch.randn(ROWS, WIDTH)), [0, 4])
    suiting = borders.suiting(range(18, 24))
    assert largest(borders, suiting) <= one + 2 * ROWS * WIDTH * 4
    assert max(largest(borders, borders.cuts(most, timed=False)) for most in range(18, 24)) >= 1.8 * one


def test_gradients_come_while_what_was_saved_goes() -> None:
    """All of one and all of the other are never there at once: a stretch takes what a step is seen to take."""
    layers = 8
    net = nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    x = torch.randn(WIDTH, WIDTH)
    borders = borders_of(net, x)
    (stage,) = borders.profile([0, len(borders.record)]).stages
    planned = stage.saved_nbytes + stage.backward_extra_nbytes + stage.cotangent_bytes + stage.gradient_nbytes
    net.zero_grad()
    with track_memory() as meter:
        net(x).sum().backward()
    assert stage.saved_nbytes + stage.gradient_nbytes >= (2 * layers - 1) * LAYER
    assert meter.peak_nbytes <= planned + LAYER
    assert planned <= meter.peak_nbytes + 3 * LAYER < (2 * layers - 1) * LAYER


def test_tapered_stretches_grow_toward_the_beginning() -> None:
    net = nn.Sequential(*(Residual() for _ in range(60)))
    borders = borders_of(net, torch.randn(ROWS, WIDTH))
    one = largest(borders_of(Residual(), torch.randn(ROWS, WIDTH)), [0, 4])
    for last, growth in ((2 * one, 1.2), (3 * one, 1.5), (5 * one, 1.0)):
        cuts = borders.tapered(last, growth)
        assert cuts == sorted(set(cuts))
        assert (cuts[0], cuts[-1]) == (0, len(borders.record))
        assert all(cut % 4 == 0 for cut in cuts[:-1])  # between blocks, where least is alive
        saved = [cost.saved_nbytes for cost in borders.profile(cuts).stages]
        wanted = [last * growth**k for k in reversed(range(len(saved)))]
        assert all(0.5 * a <= b <= 1.5 * a for a, b in zip(wanted[1:], saved[1:], strict=True))
        assert saved[0] <= 1.5 * wanted[0]  # what is left
    assert borders.tapered(1e12, 1.2) == [0, len(borders.record)]
    assert borders.tapered(0, 1.2)[-1] == len(borders.record)


def test_what_takes_no_gradient_has_no_backward_in_plans() -> None:
    """An iteration without gradients, then a few steps with them: of plain PyTorch's time, running the former again
    costs more than if it were reversed, too."""
    weight, x = (torch.randn(16, 16) / 8).requires_grad_(), torch.randn(64, 16)

    def function() -> torch.Tensor:
        z = torch.zeros(64, 16)
        with torch.no_grad():
            for _ in range(40):
                z = torch.tanh(z @ weight + x)
        for _ in range(10):
            z = torch.tanh(z @ weight + x)
        return z.square().mean()

    program = Program(function, budget="16MiB")
    program().backward()
    assert program.plan is not None
    stages = program.plan.profile.stages
    assert all(cost.forward_seconds > 0 for cost in stages)
    found = [round(cost.backward_seconds / cost.forward_seconds, 6) for cost in stages]
    assert found[0] == 0
    assert found[-1] == pytest.approx(2)
    assert found == sorted(found)  # none, or in the stage in which the gradients begin a part of it
