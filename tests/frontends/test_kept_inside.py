"""Recomputes that are given their attention: the bits of plain PyTorch, kernels run once, within the budget."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from keeping import keep_whatever_it_takes, kept
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tapestream as ts
from tapestream.ir import KeepInside, Schedule
from tapestream.planning import stage_costs
from tapestream.runner.inside import Giving, Keeping, Otherwise
from tapestream.storage.meter import track_memory

WIDTH, LENGTH, HEADS = 32, 64, 4


@pytest.fixture(autouse=True)
def _kept_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_whatever_it_takes(monkeypatch)


class Counted(TorchDispatchMode):
    """How many kernels of attention have run; entered first, so that it sees what the others let through."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += "attention" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """A block of a transformer; ``end`` says what becomes of its attention."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor] = lambda y: y, dropout: float = 0.0, times: int = 1):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.end, self.dropout, self.times = nn.LayerNorm(WIDTH), end, dropout, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.times):
            batch = x.shape[0]
            q, k, v = (
                t.view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
                for t in self.inner(self.norm(x)).chunk(3, dim=-1)
            )
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=number == 0)
            y = self.end(y).transpose(1, 2).reshape(batch, -1, WIDTH)
            x = x + F.dropout(torch.tanh(self.out(y)), 0.1, self.training)
        return x


def detached(y: torch.Tensor) -> torch.Tensor:
    return y + y.detach().mean()


def scaled_past_its_version(y: torch.Tensor) -> torch.Tensor:
    y.data.mul_(1.5)
    return y


class Cached(Attention):
    """A table that is made with the first run, and with no recompute: by attention that looks like the block's own,
    differentiated (``grad``) or not."""

    def __init__(self, *, grad: bool) -> None:
        super().__init__()
        self.table, self.grad = nn.Parameter(torch.randn(2, HEADS, LENGTH, WIDTH // HEADS)), grad
        self.cached: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "table" not in self.cached:
            with torch.set_grad_enabled(self.grad):
                self.cached["table"] = F.scaled_dot_product_attention(self.table, self.table, self.table).detach()
        return super().forward(x) + self.cached["table"].transpose(1, 2).flatten(2)


class Doubting(Attention):
    """What follows its last saved tensor cannot be left out, which a recompute finds when it has run."""

    def __init__(self) -> None:
        super().__init__(end=hooked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + 0.25
        if not bool((y * 0 == 0).all()):
            raise ValueError("not a number")
        return y


def hooked(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda g: 1.5 * g)
    return y


class Beside(Attention):
    """Attention that is not differentiated, beside its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            q = x.view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q).mul_(0.5)
        return super().forward(x) + y.transpose(1, 2).flatten(2)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [Attention() for _ in range(5)],
    "several in a block": lambda: [Attention(times=3) for _ in range(4)],
    "read beside the graph": lambda: [Attention(end=detached) for _ in range(4)],
    "some of a kind": lambda: [Attention(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), Attention(times=2)],
    "with dropout": lambda: [Attention(dropout=0.2) for _ in range(4)],
    "scaled past its version": lambda: [Attention(end=scaled_past_its_version) for _ in range(4)],
    "a table": lambda: [Cached(grad=False) for _ in range(4)],
    "a table that was differentiated": lambda: [Cached(grad=True) for _ in range(4)],
    "doubting": lambda: [Doubting() for _ in range(4)],
    "others beside": lambda: [Beside() for _ in range(4)],
}
SPARED = ("plain", "several in a block", "read beside the graph", "some of a kind", "others beside")
NOTHING = ("with dropout", "scaled past its version")


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(name: str) -> Model:
    torch.manual_seed(0)
    return Model(MODELS[name]())


def batch() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = []
    for _ in range(3):
        for block in model.modules():
            getattr(block, "cached", {}).clear()
        loss = call(batch()).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def budgets(call: Callable[[int], Any]) -> list[int]:
    """Some from the least on, of which some have room for what is kept while everything is recomputed."""
    with pytest.raises(ts.BudgetError) as refused:
        call(1)
    assert refused.value.least_nbytes is not None
    return [int(refused.value.least_nbytes * share) for share in (1.0, 1.15, 1.3, 1.5, 1.8)]


def with_room(start: Callable[[int], ts.Chain]) -> ts.Chain:
    """A chain whose plan keeps something."""
    chains = [start(budget) for budget in budgets(start)]
    return next(chain for chain in chains if kept(chain.plan))


@pytest.fixture(params=["ts.Chain", "ts.stream", "ts.stream from a disk"])
def frontend(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Callable[[Model, int | None], Any]]:
    opened: list[nn.Module] = []

    def start(model: Model, budget: int | None) -> tuple[Any, torch.optim.Optimizer]:
        if request.param == "ts.Chain":
            chain = ts.Chain(list(model.blocks), budget=budget)
            return chain, torch.optim.SGD(model.parameters(), lr=0.1)
        where = {"home": "disk", "folder": tmp_path} if "disk" in request.param else {"home": "device"}
        ts.stream(model, device="cpu", budget=budget, blocks=list(model.blocks), **where)
        opened.append(model)
        return model, ts.optimizer(model, torch.optim.SGD, lr=0.1)

    yield start
    for model in opened:
        ts.unstream(model)


@pytest.mark.filterwarnings("ignore::tapestream.BudgetExceeded")  # of a table that later calls are planned for
@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_plain_pytorch(name: str, frontend: Callable[..., Any]) -> None:
    plain = made(name)
    wanted = trained(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    found = 0
    for budget in budgets(lambda budget: frontend(made(name), budget)[0](batch())):
        model = made(name)
        call, optimizer = frontend(model, budget)
        assert same(trained(call, model, optimizer), wanted)
        found += kept(call.plan if isinstance(call, ts.Chain) else ts.report(model).plan)
    assert (found > 0) == (name not in NOTHING)


def called(blocks: list[nn.Module], budget: int, x: torch.Tensor, **options: Any) -> ts.Chain:
    chain = ts.Chain(blocks, budget=budget, **options)
    chain(x)
    return chain


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", SPARED)
def test_what_is_kept_is_not_run_again(name: str) -> None:
    def runs(chain: ts.Chain) -> int:
        with Counted() as counted:
            chain(batch()).sum().backward()
        return counted.runs

    chain = with_room(lambda budget: called(MODELS[name](), budget, batch()))
    plan = chain.plan
    assert plan is not None
    times = [getattr(block, "times", 0) for block in chain.stages]
    spared = sum(times[action.stage] for action in plan.schedule if isinstance(action, KeepInside))
    without = [action for action in plan.schedule if not isinstance(action, KeepInside)]
    bare = replace(plan, schedule=Schedule.of(without, len(times), planner="rotor"))
    other = ts.Chain(MODELS[name](), plan=bare)
    other(batch())
    assert spared > 0
    assert runs(other) - runs(chain) == spared


def test_it_stays_within_the_budget_and_goes_with_its_call() -> None:
    blocks: list[nn.Module] = [Attention(times=2) for _ in range(6)]
    x = torch.randn(4, 256, WIDTH)
    chain = with_room(lambda budget: called(blocks, budget, x, gradients_within=True))
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
        with track_memory() as meter:
            chain(x).sum().backward()
    assert meter.peak_nbytes <= chain.plan.budget.device_nbytes
    with track_memory() as meter:
        chain(x)  # never differentiated
    assert meter.end_nbytes <= 0


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    blocks: list[nn.Module] = [Attention() for _ in range(4)]
    chain, x = with_room(lambda budget: called(blocks, budget, batch())), batch()

    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("the user's own")

    with track_memory() as meter:
        out = chain(x)
        out.register_hook(fails)
        with pytest.raises(RuntimeError, match="own"):
            out.sum().backward()
        del out
    assert meter.end_nbytes <= 0
    assert all(p.grad is None for block in blocks for p in block.parameters())
    chain(x).sum().backward()
    assert all(p.grad is not None for block in blocks for p in block.parameters())


def test_short_blocks_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_costs, "INSIDE_SECONDS", 1e-1)
    blocks: list[nn.Module] = [Attention() for _ in range(4)]
    for budget in budgets(lambda budget: called(blocks, budget, batch())):
        plan = called(blocks, budget, batch()).plan
        assert kept(plan) == 0
        assert all(cost.inside_nbytes == 0 for cost in plan.profile.stages)


def attended(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


def test_what_was_written_into_is_made_again_and_other_attention_is_told() -> None:
    x = torch.randn(2, HEADS, LENGTH, 8, requires_grad=True)
    wanted = attended(x)

    def kept_once(change: Callable[[torch.Tensor], object] = lambda y: None) -> Giving:
        with Keeping() as keeping:
            change(attended(x).detach())
        return Giving(keeping.found)

    for change, runs in ((lambda y: None, 0), (lambda y: y.mul_(2.0), 1)):
        giving = kept_once(change)
        with Counted() as counted, giving:
            assert torch.equal(attended(x), wanted)
        giving.check()
        assert counted.runs == runs
    others = ({"is_causal": True}, x), ({}, x.transpose(0, 1).contiguous()), ({"scale": 0.3}, x), ({}, x.double())
    for options, other in others:
        with kept_once() as giving:
            assert torch.equal(attended(other, **options), attended(other, **options))
        with pytest.raises(Otherwise):
            giving.check()
    for times in (0, 2):
        with kept_once() as giving:
            assert all(torch.equal(attended(x), wanted) for _ in range(times))
        with pytest.raises(Otherwise):
            giving.check()


def test_what_is_not_differentiated_is_not_kept() -> None:
    x = torch.randn(2, HEADS, LENGTH, 8, requires_grad=True)
    with Keeping() as keeping:
        attended(x.detach())
        with torch.no_grad():
            attended(x)
    assert not keeping.found
