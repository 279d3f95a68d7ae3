"""Measured against simulated: bytes at the peak within 5%, forwards exactly."""

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import plain
from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.chain import Chain
from tapestream.ir import Tier
from tapestream.storage.meter import track_memory


class Wide(nn.Module):
    """Few parameters, large activations of several sizes."""

    def __init__(self, grow: int) -> None:
        super().__init__()
        self.scale, self.grow = nn.Parameter(torch.ones(8)), grow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(torch.tanh(x) * self.scale)
        return F.layer_norm(torch.cat([y] * self.grow, 0) if self.grow > 1 else y, (8,))


def convolutions() -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(8)]


def chains() -> dict[str, tuple[list[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    return {
        "wide": ([Wide(1) for _ in range(10)], torch.randn(32768, 8, requires_grad=True)),
        "growing": ([Wide(1 + (k % 4 == 2)) for k in range(9)], torch.randn(16384, 8)),
        "convolutions": (convolutions(), torch.randn(4, 4, 96, 96, requires_grad=True)),
    }


SHARES = (1.0, 0.6, 0.0)
GRID = list(
    itertools.product(["wide", "growing", "convolutions"], ["periodic", "bisection", "revolve", "rotor", "auto"])
)
CASES = [("wide", "store_all", 1.0), *((n, p, SHARES[1 + k % 2]) for k, (n, p) in enumerate(GRID))]


def chain_at(stages: list[nn.Module], x: torch.Tensor, planner: str, share: float) -> Chain:
    """A chain that has made its plan, under that share of what storing everything takes, or the least that works."""
    stored = Chain(stages, planner="store_all")
    stored(x)
    assert stored.plan is not None
    budget = max(1, int(share * stored.plan.peak_nbytes))
    try:
        Chain(stages, planner=planner, budget=budget)(x)
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        budget = error.least_nbytes
    net = Chain(stages, planner=planner, budget=budget)
    net(x).sum().backward()
    return net


def peak_of_a_step(net: Chain, x: torch.Tensor, cotangent: torch.Tensor) -> int:
    """Bytes at the peak of forward and backward, the result dropped in between; the cotangent is the caller's."""
    with track_memory() as meter:
        out = net(x)
        out, root = None, torch.autograd.graph.get_gradient_edge(out)
        torch.autograd.backward([root], [cotangent])  # type: ignore[arg-type]
    return meter.peak_nbytes


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("name", "planner", "share"), CASES)
def test_peak_bytes_and_forwards(name: str, planner: str, share: float) -> None:
    stages, x = chains()[name]
    net = chain_at(stages, x, planner, share)
    assert net.plan is not None
    for t in (x, *net.parameters()):
        t.grad = None
    counts = [0] * len(stages)

    def count(k: int) -> Any:
        def hook(*_: Any) -> None:
            counts[k] += 1

        return hook

    handles = [stage.register_forward_hook(count(k)) for k, stage in enumerate(stages)]
    gc.collect()
    cotangent = torch.ones_like(plain(stages)(x).detach())
    counts[:] = [0] * len(stages)
    measured = peak_of_a_step(net, x, cotangent)
    for handle in handles:
        handle.remove()
    simulation = net.plan.simulation
    assert sum(counts) == simulation.forwards
    assert measured > 2 * 2**20
    simulated = simulation.peak_nbytes[Tier.DEVICE]
    # The simulator counts the caller's cotangent too, which the meter does not see here.
    assert 0.95 * simulated - cotangent.nbytes <= measured <= 1.05 * simulated
