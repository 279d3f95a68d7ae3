"""Forward hooks in and on streamed blocks: called once per call, with tensors whose gradients count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from argued import WIDTH, CrossBlock, Crossed
from streamable import Chained, Dense
from streaming import DIRECT
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.module.stream import handle_of


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Four blocks; `tighten` makes them recompute and move."""
    torch.manual_seed(1)
    model = Chained([Dense() for _ in range(4)], nn.Linear(WIDTH, WIDTH))
    ts.stream(model, device="cpu", budget=1, home="disk", folder=tmp_path, machine=DIRECT)
    yield model
    ts.unstream(model)


def tighten(model: Any, *given: torch.Tensor) -> None:
    """Give it the least budget that works."""
    with pytest.raises(BudgetError) as error:
        model(*(given or (x(),)))
    handle_of(model).budget = ts.Budget(error.value.least_nbytes)


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def test_hooks_are_called_once_per_call_and_never_by_recomputes(model: Any) -> None:
    calls: list[str] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, a, o, number=number: calls.append(f"block {number}"))
        block.linear.register_forward_hook(lambda m, a, o, number=number: calls.append(f"linear {number}"))
    tighten(model)
    for _ in range(2):  # the first call profiles
        calls.clear()
        model(x()).sum().backward()
        assert calls == [f"{what} {number}" for number in range(4) for what in ("linear", "block")]


def test_a_hook_on_a_block_sees_what_the_caller_passed_and_got(model: Any) -> None:
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda m, a, o: seen.append((a[0], o)))
    model.blocks[1].register_forward_hook(lambda m, a, o: seen.append((a[0], o)))
    tighten(model)
    assert seen == []
    model(x()).sum().backward()
    assert len(seen) == 2
    assert seen[0][1] is seen[1][0]


@pytest.mark.parametrize("tight", [False, True])
def test_what_blocks_give_is_captured_beside_what_all_of_them_take(tight: bool, tmp_path: Path) -> None:
    ends = []
    for streamed in (False, True):
        torch.manual_seed(1)
        model, seen = Crossed(), list[torch.Tensor]()
        if streamed:
            ts.stream(model, device="cpu", budget=1 if tight else "1 GiB", home="disk", folder=tmp_path, machine=DIRECT)
        for block in (*model.encoder, *model.decoder):
            block.register_forward_hook(lambda m, a, o, seen=seen: seen.append(o))
        if streamed and tight:
            tighten(model, x(), x())
        out = model(x(), x())
        out.square().sum().backward()
        ends.append(
            [*(t.detach().clone() for t in seen), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
        if streamed:
            ts.unstream(model)
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_hooks_with_keyword_arguments(tmp_path: Path) -> None:
    model = ts.stream(nn.ModuleDict({"blocks": nn.ModuleList(CrossBlock() for _ in range(3))}), device="cpu")
    seen: list[Any] = []
    hook = lambda m, a, k, o: seen.append((a, sorted(k)))  # noqa: E731
    model["blocks"][1].register_forward_hook(hook, with_kwargs=True)

    def forward(y: torch.Tensor) -> torch.Tensor:
        for block in model["blocks"]:
            y = block(x=y, memory=None)
        return y

    with torch.no_grad():
        forward(x())
    assert seen == [((), ["memory", "x"])]
    ts.unstream(model)


def test_a_hook_that_replaces_an_output_is_refused(model: Any) -> None:
    model.blocks[2].linear.register_forward_hook(lambda m, a, o: o + 1)
    handle_of(model).budget = ts.Budget("1 GiB")
    with pytest.raises(InputError, match=r"forward hook on a Linear inside stage 2 \(Dense\) returns another output"):
        model(x())


def test_a_gradient_through_what_a_module_inside_was_given_raises(model: Any) -> None:
    seen: list[torch.Tensor] = []

    class Inner(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y * 1.0

    model.blocks[1].linear = nn.Sequential(model.blocks[1].linear, Inner())
    model.blocks[1].linear[1].register_forward_hook(lambda m, a, o: seen.append(a[0]))
    tighten(model)
    loss = model(x()).sum() + seen[0].square().sum()
    with pytest.raises(GradientError, match="inside of stage 1"):
        loss.backward()


def test_a_hook_on_the_gradient_of_an_output_inside_is_refused_and_of_a_blocks_own_works(model: Any) -> None:
    def halving(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient / 2)

    def retaining(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()

    tighten(model)
    for hook in (halving, retaining):
        handle = model.blocks[1].linear.register_forward_hook(hook)
        with pytest.raises(InputError, match="on the gradient of its output"):
            model(x())
        handle.remove()
    model.blocks[1].register_forward_hook(halving)
    model(x()).sum().backward()
    found = model.blocks[0].linear.weight.grad.clone()
    torch.manual_seed(1)
    plain = Chained([Dense() for _ in range(4)], nn.Linear(WIDTH, WIDTH))
    plain.blocks[1].register_forward_hook(halving)
    plain(x()).sum().backward()
    assert torch.equal(found, plain.blocks[0].linear.weight.grad)  # type: ignore[arg-type]
