"""What blocks leave behind otherwise than by returning it, and what reaches their parameters otherwise than by calls:
exact, or refused by name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import GradientError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Counting(Block):
    """What it computes depends on how often it was called: a schedule of its own."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale *= 0.9
        return super().forward(x) * self.scale + 0.1 * self.calls


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.steps = 0
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean() / self.steps


def penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 1e-2


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[..., None]) -> list[Any]:
    torch.manual_seed(1)
    for x in torch.randn(3, 32, 16):
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def plainly(model: nn.Module, x: torch.Tensor) -> None:
    model(x).backward()


def both(model: nn.Module, backward: Callable[..., None], update: str, budget: int, folder: Path | None) -> bool:
    """Whether parameters trained in plain PyTorch and streamed are the same to the last bit."""
    ours = copy.deepcopy(model)
    wanted = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), backward)
    ts.stream(ours, device="cpu", budget=budget, folder=folder)
    try:
        found = trained(ours, ts.optimizer(ours, torch.optim.AdamW, lr=1e-2, update=update), backward)
    finally:
        ts.unstream(ours)
    left = [(m.calls, m.scale) for m in ours.modules() if isinstance(m, Counting)]
    assert left == [(m.calls, m.scale) for m in model.modules() if isinstance(m, Counting)]
    return all(map(torch.equal, wanted, found))


AMPLE = 2**30


def least(model: nn.Module, update: str, folder: Path | None) -> int:
    with pytest.raises(ts.BudgetError) as refused:
        both(copy.deepcopy(model), plainly, update, 2**12, folder)
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


@pytest.mark.parametrize("ample", [True, False])
@pytest.mark.parametrize(("update", "disk"), [("step", False), ("step", True), ("backward", True)])
def test_numbers_kept_as_attributes_count_once(update: str, disk: bool, ample: bool, tmp_path: Path) -> None:
    model, folder = Net(Counting), tmp_path if disk else None
    budget = AMPLE if ample else least(model, update, folder)
    assert both(model, plainly, update, budget, folder)
    assert model.steps == 3


def test_numbers_kept_as_attributes_in_a_chain() -> None:
    def chain() -> ts.Chain:
        torch.manual_seed(0)
        return ts.Chain([Counting() for _ in range(8)], budget=36_000, planner="revolve", verify=True)

    net, plain = chain(), nn.Sequential(*(Counting() for _ in range(8)))
    plain.load_state_dict({name.removeprefix("stages."): t for name, t in net.state_dict().items()})
    x = torch.randn(32, 16)
    for _ in range(3):
        net(x).square().mean().backward()
        plain(x).square().mean().backward()
    assert net.plan.simulation.forwards > 8
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert [m.calls for m in net.modules() if isinstance(m, Counting)] == [3] * 8


def test_numbers_kept_as_attributes_in_a_loop() -> None:
    torch.manual_seed(0)
    ours, plain = Counting(), Counting()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 16)
    ts.Loop(ours, budget=40_000)(x, steps=40).square().mean().backward()
    state = x
    for _ in range(40):
        state = plain(state)
    state.square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert (ours.calls, ours.scale) == (plain.calls, plain.scale)


class Telling(Block):
    """Puts something into a list or dictionary that it is given."""

    def forward(self, x: torch.Tensor, losses: Any) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        if isinstance(losses, dict):
            losses["last"] = x.square().mean()
        else:
            losses[-1].append(x.square().mean())
        return x


class Told(Net):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(Telling)
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = self.make()
        for block in self.blocks:
            x = block(x, losses)
        return x.mean() + (losses["last"] if isinstance(losses, dict) else sum(losses[-1]))


@pytest.mark.parametrize("make", [dict, lambda: [[]], lambda: ([],)])
def test_lists_and_dictionaries_that_blocks_change(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    plain = Told(make)
    model = ts.stream(copy.deepcopy(plain), device="cpu", budget=AMPLE)
    for one in (plain, model):
        one(torch.ones(32, 16)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    ts.unstream(model)


def with_penalty(model: nn.Module, x: torch.Tensor) -> None:
    (model(x) + penalty(model)).backward()


def penalty_first(model: nn.Module, x: torch.Tensor) -> None:
    penalty(model).backward()
    model(x).backward()


@pytest.mark.parametrize("ample", [True, False])
def test_a_penalty_on_weights_of_blocks(ample: bool, tmp_path: Path) -> None:
    """In one backward with the model, its part of the gradient was lost."""
    torch.manual_seed(0)
    model = Net()
    assert both(copy.deepcopy(model), with_penalty, "step", AMPLE if ample else least(model, "step", None), None)
    for update in ("step", "backward"):
        with pytest.raises(GradientError, match="was used otherwise than by calling that module"):
            both(
                copy.deepcopy(model), with_penalty, update, AMPLE if ample else least(model, update, tmp_path), tmp_path
            )
    assert both(
        copy.deepcopy(model), penalty_first, "step", AMPLE if ample else least(model, "step", tmp_path), tmp_path
    )
    with pytest.raises(GradientError, match="from before this backward"):
        both(model, penalty_first, "backward", AMPLE, tmp_path)
