"""Parameters that are thawed or frozen after `ts.optimizer` was made, and groups that are added to it."""

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from things_kept import alive
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Tier

WIDTH = 24
HOMES = ("disk", "device")
DIRECT = ts.Machine(
    links={(Tier.DEVICE, Tier.DISK): ts.Link(1e9), (Tier.DISK, Tier.DEVICE): ts.Link(1e9)},
)


class Layered(nn.Module):
    """Blocks between two layers that are outside of them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


Change = Callable[[Any, Any, int], None]
"""What is done to the model and its optimizer before a step."""


def trained(model: Any, optimizer: Any, change: Change, steps: int = 5) -> dict[str, torch.Tensor]:
    found = {}
    for k in range(steps):
        change(model, optimizer, k)
        dtype = model.first.weight.dtype
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(k)).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        found[f"loss {k}"] = loss.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: t.detach().clone() for name, t in model.state_dict().items()}


def streamed(model: nn.Module, home: str, folder: Path, budget: str | int = "4MiB") -> Any:
    below: dict[str, Any] = {"folder": folder} if home == "disk" else {}
    return ts.stream(model, budget=budget, device="cpu", home=home, machine=DIRECT, blocks=list(model.blocks), **below)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, t in expected.items() if not torch.equal(t, found[name])] == []


def gradually(model: Any, _: Any, k: int) -> None:
    if k == 0:
        model.requires_grad_(False)
        model.blocks[2:].requires_grad_(True)
    elif k == 1:
        model.blocks[0][0].bias.requires_grad_(True)
    elif k == 3:
        model.requires_grad_(True)


def in_turns(model: Any, _: Any, k: int) -> None:
    model.blocks[0].requires_grad_(k % 2 == 0)
    model.blocks[1].requires_grad_(k % 2 == 1)
    model.blocks[2][0].weight.requires_grad_(k % 2 == 1)
    model.first.requires_grad_(k % 2 == 1)


@pytest.mark.parametrize("change", [gradually, in_turns])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", HOMES)
def test_what_takes_gradients_is_trained(home: str, update: str, change: Change, tmp_path: Path) -> None:
    plain, ours = Layered(), Layered()
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), change)
    change(ours, None, 0)
    optimizer = ts.optimizer(streamed(ours, home, tmp_path), torch.optim.AdamW, lr=0.01, update=update)
    assert_equal(trained(ours, optimizer, change), expected)
    order = [id(p) for p in ours.parameters()]  # that of an optimizer that is made now
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == order


@pytest.mark.parametrize("home", HOMES)
def test_masters_of_what_is_thawed(home: str, tmp_path: Path) -> None:
    """As if it had been trained from the start, where its first gradients are those after it was thawed."""
    found = []
    for groups in (None, "all"):
        model = Layered(torch.bfloat16)
        gradually(model, None, 0)
        streamed(model, home, tmp_path / str(groups))
        given = groups and [{"params": list(model.parameters())}]
        found.append(trained(model, ts.optimizer(model, torch.optim.AdamW, lr=0.01, groups=given), gradually))
        ts.unstream(model)
    assert_equal(*found)


@pytest.mark.parametrize("home", HOMES)
def test_groups_for_what_is_thawed(home: str, tmp_path: Path) -> None:
    def change(model: Any, optimizer: Any, k: int) -> None:
        if k in (1, 3):
            part = model.blocks[1] if k == 1 else model.first
            part.requires_grad_(True)
            optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.003})

    found = []
    for model in (Layered(), Layered()):
        model.blocks[:2].requires_grad_(False)
        model.first.requires_grad_(False)
        chosen = [p for p in model.parameters() if p.requires_grad]
        ours = bool(found) and streamed(model, home, tmp_path)
        optimizer = ts.optimizer(ours, torch.optim.AdamW, lr=0.01) if ours else torch.optim.AdamW(chosen, lr=0.01)
        found.append(trained(model, optimizer, change))
    assert_equal(found[1], found[0])
    with pytest.raises(InputError, match=r"cannot take this group.*more than one"):
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})


def test_a_group_between_a_backward_and_its_step(tmp_path: Path) -> None:
    """The call has taken the block over already; it may have a group all the same."""
    found = []
    for which in ("plain", "ours"):
        model = Layered()
        model.blocks[0].requires_grad_(False)
        if which == "ours":
            optimizer: Any = ts.optimizer(streamed(model, "disk", tmp_path), torch.optim.SGD, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        model.blocks[0].requires_grad_(True)
        loss = model(torch.ones(2, WIDTH)).sum()
        if which == "ours":
            with pytest.raises(InputError, match="between a forward and its backward"):
                optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        loss.backward()
        optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 0.01})
        optimizer.step()
        found.append({name: t.detach().clone() for name, t in model.state_dict().items()})
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("home", HOMES)
def test_the_budget_counts_the_state_of_what_is_thawed(home: str, tmp_path: Path) -> None:
    model = Layered()
    model.blocks[:3].requires_grad_(False)
    optimizer = ts.optimizer(
        streamed(model, home, tmp_path), torch.optim.AdamW, lr=0.01, groups=[{"params": list(model.parameters())}]
    )
    trained(model, optimizer, lambda *_: None, steps=1)
    blocks = handle_of(model).store.blocks
    assert [sum(part.nbytes for part in block.state_parts) > 0 for block in blocks] == [False, False, False, True]
    before = ts.report(model).plan.profile.blocks[0].optimizer_state_nbytes
    model.blocks.requires_grad_(True)
    trained(model, optimizer, lambda *_: None, steps=1)
    assert ts.report(model).plan.profile.blocks[0].optimizer_state_nbytes > before
    state = optimizer.state[model.blocks[0][0].weight]
    model.blocks.requires_grad_(False)  # it stays where it is
    trained(model, optimizer, lambda *_: None, steps=1)
    assert torch.equal(optimizer.state[model.blocks[0][0].weight]["exp_avg"], state["exp_avg"])


class MostAlive(TorchDispatchMode):
    """Most bytes of the device that are alive beside those of before, looked at where state and temporaries are made.
    `ts.track_memory` would be wrong here: it does not know the sizes of what was made before it and goes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.nbytes = alive(), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if any(name in str(function) for name in ("zeros_like", "addcdiv")):
            self.nbytes = max(self.nbytes, alive() - self.before)
        return out


def wide(*, frozen: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)])
    model[:frozen].requires_grad_(False)
    return model


def thawed_before_a_forward(model: Any, x: torch.Tensor) -> None:
    model[2:6].requires_grad_(True)
    model(x).square().mean().backward()


def thawed_between_two_forwards(model: Any, x: torch.Tensor) -> None:
    first = model(x).square().mean()
    model[2:6].requires_grad_(True)
    second = model(x).square().mean()
    first.backward()
    second.backward()


def thawed_for_gradients_by_hand(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model[2:6].requires_grad_(True)
    for parameter in model[2:6].parameters():
        parameter.grad = torch.full_like(parameter, 0.01)


def stepped_at(model: nn.Module, optimizer: Any, way: Callable[[Any, torch.Tensor], None], most: Any) -> None:
    for k in range(4):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(k))
        if k == 1:
            way(model, x)
        else:
            model(x).square().mean().backward()
        with most:
            optimizer.step()
        optimizer.zero_grad()


def stepped_within(budget: int, home: str, folder: Path, way: Any, expected: dict[str, torch.Tensor]) -> int | None:
    """Steps within this budget, checked; or the budget that is named where it is too small."""
    gc.collect()
    gc.freeze()  # `alive` is asked at every operation: it need not look through what was there before
    most, model = MostAlive(), wide()
    below: dict[str, Any] = {"folder": folder} if home == "disk" else {}
    ts.stream(model, budget=budget, device="cpu", home=home, machine=DIRECT, **below)
    given = [{"params": list(model.parameters())}]
    try:
        stepped_at(model, ts.optimizer(model, torch.optim.AdamW, lr=0.01, groups=given), way, most)
    except BudgetError as error:
        return error.least_nbytes
    assert 0.5 * budget < most.nbytes <= 1.01 * budget + 1024
    assert_equal(dict(model.state_dict()), expected)
    return None


@pytest.mark.on_cpu("counts what lies in the process's memory")
@pytest.mark.parametrize("way", [thawed_before_a_forward, thawed_between_two_forwards, thawed_for_gradients_by_hand])
@pytest.mark.parametrize("home", HOMES)
def test_state_of_what_is_thawed_is_within_the_budget(home: str, way: Any, tmp_path: Path) -> None:
    """State is made in a step, for which plans have room, be its parameters thawed when that call's plans were made or
    not: at the least budget, which may be refused when they are thawed, and names one that works."""
    plain = wide()
    stepped_at(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), way, contextlib.nullcontext())
    expected = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    budgets = [1]
    while (named := stepped_within(budgets[-1], home, tmp_path / str(budgets[-1]), way, expected)) is not None:
        assert budgets[-1] < named < 2**23
        budgets.append(named)


@pytest.mark.parametrize("home", HOMES)
def test_all_parameters_are_those_that_have_gradients_by_hand_too(home: str, tmp_path: Path) -> None:
    plain, model = Layered(), Layered()
    found = []
    for one in (plain, model):
        one.blocks[:2].requires_grad_(False)
        optimizer = (
            torch.optim.AdamW(plain.parameters(), lr=0.01)
            if one is plain
            else ts.optimizer(streamed(model, home, tmp_path), torch.optim.AdamW, lr=0.01)
        )
        one(torch.ones(8, WIDTH)).square().mean().backward()
        one.blocks[0].requires_grad_(True)
        for parameter in one.blocks[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append({name: t.detach().clone() for name, t in one.state_dict().items()})
    assert_equal(found[1], found[0])


def test_gradients_by_hand_beside_updates_within_the_backward(tmp_path: Path) -> None:
    model = Layered()
    optimizer = ts.optimizer(streamed(model, "disk", tmp_path), torch.optim.AdamW, lr=0.01, update="backward")
    model(torch.ones(8, WIDTH)).square().mean().backward()
    weight = model.blocks[1][0].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(GradientError, match=r"\(24, 24\) in block 1 that no backward .* use update='step'"):
        optimizer.step()


def test_a_state_dict_of_what_was_thawed_is_taken_by_an_optimizer_made_later(tmp_path: Path) -> None:
    model = Layered()
    gradually(model, None, 0)
    optimizer = ts.optimizer(streamed(model, "disk", tmp_path / "a"), torch.optim.AdamW, lr=0.01)
    trained(model, optimizer, gradually)
    other = Layered()
    other.load_state_dict(model.state_dict())
    later = ts.optimizer(streamed(other, "disk", tmp_path / "b"), torch.optim.AdamW, lr=0.01)
    later.load_state_dict(optimizer.state_dict())
    goes_on = lambda *_: None  # noqa: E731
    assert_equal(trained(other, later, goes_on), trained(model, optimizer, goes_on))


def test_thawed_between_two_forwards(tmp_path: Path) -> None:
    model, x = Layered(), torch.ones(2, WIDTH)
    model.blocks[0].requires_grad_(False)
    optimizer = ts.optimizer(streamed(model, "device", tmp_path), torch.optim.SGD, lr=0.1)
    first = model(x).sum()
    model.blocks[0].requires_grad_(True)
    with pytest.raises(InputError, match=r"'blocks.0.0.weight' was switched on between .* call backward\(\) first"):
        model(x)
    model.blocks[0].requires_grad_(False)
    first.backward()
    optimizer.step()


def test_parameters_put_into_a_group_by_hand(tmp_path: Path) -> None:
    model = Layered()
    model.first.requires_grad_(False)
    optimizer = ts.optimizer(streamed(model, "device", tmp_path), torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["params"].extend(model.first.parameters())
    with pytest.raises(InputError, match=r"in place; use optimizer.add_param_group"):
        optimizer.step()
