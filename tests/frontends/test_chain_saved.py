"""Saved tensors that travel to a slower tier and back: the same bits, the same strides, nothing that is not theirs."""

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import assert_same, plain, train
from models import CASES, Case, rows
from thinned import one_in
from tiered import DEVICE, DISK, DISKS, HOST, HOSTS, chain_by_hand, moved_by, saved_away
from torch import nn

from tapestream.errors import GradientError
from tapestream.frontends.chain import Chain
from tapestream.storage.meter import track_memory


class Twisted(nn.Module):
    """Saves views of one storage, a conjugate, an expanded tensor, an empty one, a transposed product, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(12)), torch.rand(5, 12) > 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.tanh(torch.cat((x, x.flip(-1)), -1))
        left, right = both[:, :12], both[:, 12:].t()
        wave = torch.complex(left, right.t())
        y = (left * right.t() + (wave * wave.conj()).real).masked_fill(self.mask, 0.5)
        y = y * self.weight.exp().expand(5, 12) + (y[:0] * y[:0]).sum()
        return y.index_select(0, torch.randperm(5)) * F.dropout(y, 0.3)


class Square(torch.autograd.Function):
    """Saves its output and an input under save_for_backward, a number on the side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return cotangents[0] * torch.cos(x) + 0 * y


def large() -> list[Any]:
    """Saved tensors above and below the size at which they travel alone; one written in place by the next stage."""
    return [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1)),
        nn.Flatten(2),
    ]


SLACK = 128  # bytes of room around the copy that a stage which writes into its input gets
CLEAN = ("large", "gpt", "resnet", "lstm", "mixer", "tied", "repeated", "rrelu", "adapter")
"""Chains whose saved tensors are all made inside their stages."""


def shared() -> list[Any]:
    layer = nn.Linear(6, 6)
    return [layer, nn.Tanh(), layer, Square.apply, layer, lambda x: F.relu_(layer(x))]


MORE = {
    "large": Case(large, lambda: torch.randn(4, 3, 64, 64)),
    "twisted": Case(lambda: [Twisted() for _ in range(4)], rows(5, 12)),
    "shared": Case(shared, rows(3, 6)),
    **CASES,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "engine"), one_in(2, itertools.product(MORE, ["threads", "adversarial", "fake_streams"]))
)
def test_all_saved_tensors_away_and_back(name: str, engine: str, tmp_path: Path) -> None:
    case = MORE[name]
    tier, machine, folder = (HOST, HOSTS, None) if engine == "fake_streams" else (DISK, DISKS, tmp_path)
    ours, theirs = case.stages(), case.stages()
    schedule = saved_away(len(ours), tier)
    net = chain_by_hand(case, ours, schedule, folder=folder, machine=machine, engine=engine)
    expected = train(plain(theirs), theirs, case, steps=1)
    assert_same(expected, train(net, ours, case, steps=1))
    assert net.plan is not None
    assert net.plan.schedule == schedule
    if name in CLEAN:
        wanted = net.plan.simulation.bytes_moved[DEVICE, tier]
        assert wanted - SLACK * len(ours) <= moved_by(net)[DEVICE, tier] <= wanted
        assert moved_by(net)[tier, DEVICE] == moved_by(net)[DEVICE, tier]
        assert net.copies.copies == 2 * sum(stage.saved_storages for stage in net.plan.profile.stages[:-1])


class Holding(nn.Module):
    """Saves, besides a tensor of its own, what others hold: a parameter, a constant, its input, its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.constant = nn.Parameter(torch.randn(300, 300)), torch.randn(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.exp(x * 0.1) * self.constant * self.weight)


def test_only_what_the_graph_alone_holds_travels_and_its_bytes_are_freed(tmp_path: Path) -> None:
    """Of each stage exp's output and the product with the constant; exp also saves what it gets."""
    torch.manual_seed(0)
    case = Case(lambda: [Holding() for _ in range(4)], lambda: torch.randn(300, 300))
    stages = case.stages()
    net = chain_by_hand(case, stages, saved_away(4, DISK), folder=tmp_path, machine=DISKS)
    x = case.batch().requires_grad_()
    net(x).sum().backward()
    assert net.plan is not None
    nbytes = x.nbytes
    assert moved_by(net) == dict.fromkeys([(DEVICE, DISK), (DISK, DEVICE)], 6 * nbytes)
    assert [stage.saved_storages for stage in net.plan.profile.stages] == [2] * 4
    # The graph holds the number 0.1, too, and not as a saved tensor.
    assert net.plan.simulation.bytes_moved[DEVICE, DISK] == pytest.approx(6 * nbytes, rel=1e-4)
    gc.collect()
    with track_memory() as meter:
        out = net(x)
    # Four states that backward reads, and what the last stage saves; all else is on the disk.
    assert meter.end_nbytes == pytest.approx(6 * nbytes, rel=0.05)
    del out


def test_a_saved_tensor_written_in_place_is_refused_wherever_it_is(tmp_path: Path) -> None:
    leaked: list[torch.Tensor] = []

    def leaking(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        leaked[:] = [y.detach()]
        return y.sin() + torch.exp(2 * x)

    case = Case(lambda: [leaking, torch.tanh, torch.sin], lambda: torch.randn(300, 300))
    net = chain_by_hand(case, case.stages(), saved_away(3, DISK), folder=tmp_path, machine=DISKS, engine="adversarial")
    out = net(case.batch().requires_grad_())
    leaked[0].add_(1)
    with pytest.raises(GradientError, match=r"stage 0 \(leaking\) saved for its backward was modified by an in-place"):
        out.sum().backward()


def test_where_in_its_storage_a_state_begins_is_the_same_when_it_comes_back(tmp_path: Path) -> None:
    """`as_strided` with an offset counts from the beginning of the storage, which may not be that of other bytes."""

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((64, 48), (96, 1), 48).repeat(2, 1).tanh() + x

    stages = [strided, torch.sin] * 4
    x = torch.randn(128, 48, generator=torch.Generator().manual_seed(0))
    wanted, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = wanted
    for stage in stages:
        y = stage(y)
    y.sum().backward()
    net = Chain(stages, planner="offload", budget=6 * x.nbytes, folder=tmp_path, machine=DISKS)
    net(found).sum().backward()
    assert net.plan is not None
    assert net.plan.simulation.bytes_moved
    assert net.plan.simulation.forwards > len(stages)
    assert wanted.grad is not None
    assert found.grad is not None
    assert torch.equal(found.grad, wanted.grad)
