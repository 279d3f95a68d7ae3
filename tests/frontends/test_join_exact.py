"""`Join`: bits of plain PyTorch, what is done is what was simulated, bytes within the budget."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import Trace, assert_same, copy_of, modules_of, plain, seed
from models import Stages
from tiered import DISKS, ENGINES, moved_by, runs_counted
from torch import nn

from tapestream.costs import Budget
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.chain import Chain
from tapestream.frontends.join import Join
from tapestream.ir import (
    Action,
    Backward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Value,
    Wait,
)
from tapestream.planning.plan import Plan
from tapestream.storage.meter import track_memory


class Layer(nn.Module):
    """A layer with everything that a recompute may get wrong."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.BatchNorm1d(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.inner(self.norm(x)), inplace=True)
        return x + F.dropout(self.outer(inner), self.dropout, self.training)


class Pairs(nn.Module):
    """From a pair to a pair, one half passing through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Layer(width)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(state[0]) * state[1].sigmoid(), state[1]


class Contrast(nn.Module):
    """The loss of two towers that should agree, with a temperature that is learnt and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits = F.normalize(a + 0.01 * torch.randn_like(a)) @ F.normalize(b).T * self.scale
        return F.cross_entropy(logits, torch.arange(len(a)))


def tower(n: int, width: int = 16) -> Stages:
    return [Layer(width) for _ in range(n)]


def distance(a: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return sum(((a - b).square().mean() for b in others), a.mean())


def batch(width: int = 16) -> torch.Tensor:
    return torch.randn(32, width, requires_grad=True)


Made = tuple[list[Stages], Callable[..., Any], list[Any]]


def towers() -> Made:
    return [tower(5), tower(3)], Contrast(), [batch(), batch()]


def siamese() -> Made:
    both = tower(4)
    return [both, both], distance, [batch(), batch()]


def triplet() -> Made:
    """Three branches with the same weights, each used twice, and one input for two of them."""
    layer, x = Layer(16), batch()
    stages: Stages = [layer, nn.Linear(16, 16), layer]
    return [stages, stages, [*stages, nn.Linear(16, 16)]], distance, [x, batch(), x]


def mixed() -> Made:
    """A pair in one branch, a frozen branch, an input without gradient."""
    frozen = tower(2)
    modules_of(frozen).requires_grad_(False)
    pairs: Stages = [Pairs(16) for _ in range(4)]
    head = lambda pair, b, c: distance(pair[0] + pair[1], b, c)  # noqa: E731
    return [pairs, frozen, tower(3)], head, [(batch(), torch.randn(32, 16)), torch.randn(32, 16), batch()]


def shared() -> Made:
    """One tensor is the input of three branches, each of which uses it twice."""
    x = batch()
    return [tower(3), tower(2), tower(3)], distance, [x, x, x]


CASES = {"towers": towers, "siamese": siamese, "triplet": triplet, "shared": shared, "mixed": mixed}


def made(name: str) -> Made:
    seed(5)
    return CASES[name]()


def owner_of(branches: list[Stages], head: Any) -> nn.ModuleList:
    return modules_of([stage for stages in branches for stage in stages] + [head])


def plainly(branches: list[Stages], head: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: head(*(plain(stages)(x) for stages, x in zip(branches, inputs, strict=True)))


def train(call: Callable[..., Any], parts: Made, autocast: bool = False) -> Trace:
    """What three steps of SGD leave behind."""
    branches, head, inputs = parts
    owner = owner_of(branches, head)
    optimizer = torch.optim.SGD([p for p in owner.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    leaves = [x for x in torch.utils._pytree.tree_leaves(inputs) if x.requires_grad]
    seed(3)
    trace: Trace = {}
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(*inputs)
        loss.backward()
        trace[f"{step} loss"] = copy_of(loss)
        trace |= {f"{step} input {i}": copy_of(x.grad) for i, x in enumerate(leaves)}
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in owner.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        trace |= {f"{step} buffer {name}": copy_of(b) for name, b in owner.named_buffers()}
    trace["torch"] = torch.get_rng_state()
    return trace


def planned(parts: Made, share: float, autocast: bool = False) -> Join:
    """A join that has made its plan, with that share of what storing everything takes or the least that works."""
    branches, head, inputs = parts

    def called(**options: Any) -> Join:
        net = Join(branches, head, **options)
        before = {key: tensor.clone() for key, tensor in owner_of(branches, head).state_dict().items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            net(*inputs)
        owner_of(branches, head).load_state_dict(before)
        gc.collect()
        return net

    stored = called().plan
    assert stored is not None
    assert stored.simulation.forwards == stored.profile.runs
    try:
        return called(budget=max(1, int(share * stored.peak_nbytes)))
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        return called(budget=error.least_nbytes * 103 // 100)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", CASES)
def test_bits_and_runs(name: str, share: float) -> None:
    theirs, ours = made(name), made(name)
    net = planned(ours, share)
    assert net.plan is not None
    with runs_counted([stage for stages in ours[0] for stage in stages]) as runs:
        found = train(net, ours)
    assert_same(train(plainly(*theirs[:2]), theirs), found)
    assert runs == [3 * net.plan.simulation.forwards]
    if share < 1:
        assert net.plan.simulation.forwards > net.plan.profile.runs
    if name in ("siamese", "triplet", "shared"):  # whose branches share something
        backwards = [action.stage for action in net.plan.schedule if isinstance(action, Backward)]
        assert backwards == sorted(backwards, reverse=True)


@pytest.mark.parametrize("name", ["towers", "siamese"])
def test_bits_under_autocast(name: str) -> None:
    theirs, ours = made(name), made(name)
    net = planned(ours, 0.5, autocast=True)
    assert_same(train(plainly(*theirs[:2]), theirs, autocast=True), train(net, ours, autocast=True))
    assert net.plan is not None
    assert net.plan.simulation.forwards > net.plan.profile.runs


def saved_away(lengths: list[int], tier: Tier) -> Schedule:
    """Every stage recorded branch by branch; saved tensors go to ``tier`` and come back one stage ahead."""
    starts = [sum(n + 1 for n in lengths[:i]) for i in range(len(lengths))]
    stages = [k for start, n in zip(starts, lengths, strict=True) for k in range(start, start + n)]
    saved = {k: Value(Kind.SAVED, k) for k in stages}
    actions: list[Action] = [Phase(PhaseKind.FORWARD)]
    for before, k in zip([None, *stages], stages, strict=False):
        if k in starts[1:]:
            actions += [Keep(k - 1), Restore(k), Free(Value(Kind.STATE, k), Tier.DEVICE)]
        actions.append(Record(k))
        if before is not None:
            actions += [Wait(saved[before], tier), Free(saved[before], Tier.DEVICE)]
        if k != stages[-1]:
            actions.append(Offload(saved[k], Tier.DEVICE, tier))
    actions.append(Phase(PhaseKind.BACKWARD))
    for k, ahead in zip(reversed(stages), [*reversed(stages[:-1]), None], strict=True):
        if ahead is not None:
            actions.append(Prefetch(saved[ahead], tier, Tier.DEVICE))
        actions.append(Backward(k))
        if ahead is not None:
            actions.append(Wait(saved[ahead], Tier.DEVICE))
    return Schedule.of(actions, starts[-1] + lengths[-1], planner="hand")


@pytest.mark.on_cpu("engines that copy between places of one RAM")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["towers", "triplet"])
def test_a_given_plan_moves_what_it_says(name: str, engine: str, tmp_path: Path) -> None:
    theirs, ours = made(name), made(name)
    stored = planned(made(name), 1.0).plan
    assert stored is not None
    schedule = saved_away([len(stages) for stages in ours[0]], Tier.DISK)
    plan = Plan.judged(schedule, stored.profile, Budget(), DISKS)
    net = Join(*ours[:2], plan=plan, folder=tmp_path, machine=DISKS, engine=engine)
    assert_same(train(plainly(*theirs[:2]), theirs), train(net, ours))
    assert moved_by(net)[Tier.DEVICE, Tier.DISK] > 0


class Wide(nn.Module):
    """Few parameters, large activations."""

    def __init__(self, grow: int = 1) -> None:
        super().__init__()
        self.scale, self.grow = nn.Parameter(torch.ones(8)), grow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(torch.tanh(x) * self.scale)
        return F.layer_norm(torch.cat([y] * self.grow, 0), (8,))


@pytest.mark.thinned(4)
@pytest.mark.on_cpu("its bytes are measured")
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_bytes_at_the_peak(share: float) -> None:
    branches: list[Stages] = [[Wide(1 + (k == 2)) for k in range(7)], [Wide() for _ in range(4)]]
    inputs = [torch.randn(16384, 8, requires_grad=True), torch.randn(32768, 8, requires_grad=True)]
    net = planned((branches, distance, inputs), share)
    assert net.plan is not None
    net(*inputs).backward()
    gc.collect()
    with track_memory() as meter:
        net(*inputs).backward()
    simulated = net.plan.simulation.peak_nbytes[Tier.DEVICE]
    beside = sum(t.nbytes for t in (*net.parameters(), *inputs))  # gradients, which are there already
    assert meter.peak_nbytes > 2 * 2**20
    assert 0.95 * simulated - beside <= meter.peak_nbytes <= 1.05 * simulated + beside


def test_without_gradients_and_without_a_head() -> None:
    branches, head, inputs = made("towers")
    net = Join(branches, budget=1)
    with torch.no_grad():
        a, b = net(*inputs)
    assert net.plan is None
    assert a.shape == b.shape == (32, 16)
    assert {id(p) for p in Join(branches, head).parameters()} == {id(p) for p in owner_of(branches, head).parameters()}
    behind = nn.Linear(16, 1)
    known = Join(branches, lambda a, b: behind(a + b).sum()).parameters()
    assert any(p is behind.weight for p in known)


def test_one_branch_is_a_chain() -> None:
    seed(5)
    stages, x = tower(5), batch()
    budget = planned(([stages], distance, [x]), 0.5).budget
    trace = []
    for net in (Join([stages], distance, budget=budget), Chain(stages, budget=budget, planner="rotor")):
        seed(4)
        x.grad = None
        out = net(x)
        (out if isinstance(net, Join) else distance(out)).backward()
        trace.append(copy_of(x.grad))
    assert_same({"x": trace[0]}, {"x": trace[1]})


def test_what_cannot_be_is_named() -> None:
    branches, head, inputs = made("towers")
    with pytest.raises(InputError, match=r"every branch needs at least one stage, found branches of \[5, 0\] stages"):
        Join([branches[0], []], head)
    net = Join(branches, head)
    with pytest.raises(InputError, match="there are 2 branches, found 1 inputs"):
        net(inputs[0])
    with pytest.raises(BudgetError, match="the least found to work is"):
        Join(branches, head, budget=100)(*inputs)
    loss = net(*inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="a second time"):
        loss.backward()

    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3)

    with pytest.raises(RuntimeError):
        Join([branches[0], [Bad()]], head)(*inputs)
    with pytest.raises(InputError, match=r"branch 1, stage 0 .* has parameters on meta"):
        Join([branches[0], [nn.Linear(16, 16, device="meta")]], head)(*inputs)
