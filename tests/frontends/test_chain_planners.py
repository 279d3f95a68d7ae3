"""Every registered planner runs real chains, with RAM above a disk: exact gradients, and what was done is what was
simulated."""

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import Trace, assert_same, called_once, plain, train
from models import Attention, Case, Stages
from thinned import one_in
from tiered import DISKS, ENGINES, moved_by, runs_counted
from torch import nn

from tapestream.costs import Profile
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.below import NEVER_MOVE
from tapestream.frontends.chain import Chain
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.storage.meter import track_memory

STEPS = 1
KNOBS: dict[str, dict[str, Any]] = {
    "h_revolve": {"slots": (2, 3)},
    "disk_revolve": {"slots": 2},
    "periodic_disk_revolve": {"slots": 1, "period": 3},
    "double": {"interval": 2, "segment": 1},
    "async_multistage": {"slots": 1, "interval": 2},
    "offload": {"tail": 2, "ahead": 1},
    "superneurons": {"recompute": "speed", "heavy": (1, 3, 5)},
}
"""With which those that can move something do."""
MOVERS = {name: frozenset(("cnn", "transformer", "recurrent")) for name in KNOBS}
MOVERS["superneurons"] = frozenset(("recurrent",))  # elsewhere one stage alone takes its least budget
TIGHT = frozenset(("superneurons",))
"""Those that move nothing unless the budget is the least that they can do with."""


class Layer(nn.Module):
    """Convolution, norm, dropout; every third one makes the picture smaller, every third one leaves out the norm."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, stride=1 + (k % 3 == 2))
        self.norm = nn.BatchNorm2d(6) if k % 3 else nn.Identity()
        self.end = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.norm(self.conv(x)))


class Cell(nn.Module):
    """One step of a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.outer(torch.tanh(self.inner(x))), 0.1, training=self.training)


def recurrent() -> Stages:
    return [Cell()] * 10


CHAINS = {
    "cnn": Case(lambda: [Layer(k) for k in range(8)], lambda: torch.randn(2, 6, 88, 88)),
    "transformer": Case(lambda: [Attention(32, dropout=0.1) for _ in range(8)], lambda: torch.randn(12, 64, 32)),
    "recurrent": Case(recurrent, lambda: torch.randn(768, 64)),
}


@cache
def stored(name: str) -> tuple[Profile, int]:
    """The profile of a chain, and what storing everything takes."""
    plan = called_once(CHAINS[name], CHAINS[name].stages(), planner="store_all").plan
    assert plan is not None
    return plan.profile, plan.peak_nbytes


@cache
def expected(name: str) -> Trace:
    stages = CHAINS[name].stages()
    return train(plain(stages), stages, CHAINS[name], steps=STEPS)


def options(planner: str, name: str) -> dict[str, Any] | None:
    """Knobs, and a budget of half of what storing everything takes, or the least that the planner can do with; None
    where the planner does not take such a chain."""
    profile, nbytes = stored(name)
    knobs = KNOBS.get(planner, {})
    budget = 1 if planner in TIGHT else nbytes // 2
    try:
        planners[planner](profile, budget, DISKS, **knobs)
    except InputError:
        return None
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        budget = error.least_nbytes * 103 // 100
    return {"planner": planner, "budget": budget, "machine": DISKS, **knobs}


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("planner", "name", "engine"),
    one_in(
        2, [(p, name, e) for p in planners for name in CHAINS for e in (ENGINES[:1] if p in NEVER_MOVE else ENGINES)]
    ),
)
def test_what_is_done_is_what_was_simulated(planner: str, name: str, engine: str, tmp_path: Path) -> None:
    case, chosen = CHAINS[name], options(planner, name)
    if chosen is None:
        assert name == "cnn"  # the other two chains are of equal stages, which every planner takes
        return
    stages = case.stages()
    net = Chain(stages, folder=tmp_path, engine=engine, **chosen)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    net(case.batch().requires_grad_())  # makes the plan
    net.load_state_dict(before)
    assert net.plan is not None
    assert net.plan.planner == planner
    simulation, moved = net.plan.simulation, moved_by(net)
    with runs_counted(stages) as runs:
        found = train(net, stages, case, steps=STEPS)
    assert_same(expected(name), found)
    assert runs == [STEPS * simulation.forwards]
    wanted = {lane: moved.get(lane, 0) + STEPS * nbytes for lane, nbytes in simulation.bytes_moved.items() if nbytes}
    done = {lane: nbytes for lane, nbytes in moved_by(net).items() if nbytes}
    # A profiled stage saves copies of its buffers; what the first run saves are the buffers themselves, which stay.
    slack = STEPS * sum(b.nbytes for b in net.buffers())
    assert done.keys() == wanted.keys()
    assert all(wanted[lane] - slack <= done[lane] <= wanted[lane] for lane in wanted)
    assert wanted or name not in MOVERS.get(planner, ())
    if moved and engine == "threads":
        _check_peak(net, case)


@pytest.mark.parametrize("planner", ["mixed", "h_revolve", "disk_revolve", "double", "async_multistage"])
def test_equal_stages_of_an_input_without_gradient(planner: str, tmp_path: Path) -> None:
    """The first stage is cheaper than the others then, which is no matter."""
    net = Chain(recurrent(), folder=tmp_path, planner=planner, machine=DISKS, **KNOBS.get(planner, {}))
    x = CHAINS["recurrent"].batch()

    def gradients(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        net.zero_grad()
        run(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    for _ in range(2):
        found = gradients(net)
        assert all(map(torch.equal, found, gradients(plain(list(net.stages)))))
    assert net.plan is not None
    assert net.plan.planner == planner


def _check_peak(net: Chain, case: Case) -> None:
    """Bytes at the peak of forward and backward, the result dropped in between. The cotangent is the caller's, and
    gradients of parameters are outside the budget."""
    assert net.plan is not None
    x = case.batch().requires_grad_()
    cotangent = torch.ones_like(net(x))
    gc.collect()
    with track_memory() as meter:
        root = torch.autograd.graph.get_gradient_edge(net(x))
        torch.autograd.backward([root], [cotangent])  # type: ignore[arg-type]
    simulated = net.plan.simulation.peak_nbytes[Tier.DEVICE]
    beside = sum(p.nbytes for p in net.parameters())
    assert 0.95 * simulated - cotangent.nbytes <= meter.peak_nbytes <= 1.05 * simulated + beside
