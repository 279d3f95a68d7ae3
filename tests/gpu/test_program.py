"""A program on a real device gives the bits of plain PyTorch there, whatever moves to host memory meanwhile."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts


class Block(nn.Module):
    """Views, a write in place, a dropout, statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.up(self.norm(x)))
        y[:, 0] = y[:, 1] * 0.5
        left, right = F.gelu(y).chunk(2, 1)
        return x + F.dropout(self.down(torch.cat([right, left.flip(0)], 1)), 0.1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(256) for _ in range(8))).cuda()


def trace(net: nn.Module, call: object, steps: int) -> list[Tensor]:
    """Losses, gradients and buffers of some steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(512, 256, device="cuda")
        loss = call(x * 1.0).square().mean()  # type: ignore[operator]
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        found += [b.clone() for b in net.buffers()]
        net.zero_grad()
    return found


@pytest.mark.parametrize("part", [0.3, 0.6])
@pytest.mark.parametrize("planner", ["auto", "joint", "offload", "superneurons", "rotor"])
def test_equal_bits_within_the_budget(planner: str, part: float) -> None:
    plain, net, probe = network(), network(), network()
    wanted = trace(plain, plain, 5)
    stored = ts.Program(probe, budget="4GiB", planner="store_all")
    trace(probe, stored, 2)
    assert stored.plan is not None
    budget = int(part * stored.plan.peak_nbytes)
    run = ts.Program(net, budget=budget, planner=planner)
    found = trace(net, run, 5)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    if planner in ("joint", "offload", "superneurons"):
        assert run.copies.copies > 0, "nothing has moved to the host"
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(512, 256, device="cuda")
    with ts.track_memory("cuda") as meter:
        run(x).square().mean().backward()
    assert meter.peak_nbytes <= 1.05 * budget + 4 * x.nbytes


def test_calls_that_are_not_noted_and_one_that_turns_out_otherwise() -> None:
    """Dropouts draw on after what was not noted as plain PyTorch's do."""
    found = []
    for programmed in (False, True):
        net, depth = network(), [4]

        def deep(x: Tensor, net: nn.Sequential = net, depth: list[int] = depth) -> Tensor:
            for block in (*net, *net)[: depth[0]]:
                x = block(x)
            return x

        call = ts.Program(deep, budget="1GiB") if programmed else deep
        found.append([t for depth[0] in (4, 4, 12, 4) for t in trace(net, call, 2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
