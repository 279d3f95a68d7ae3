"""Calls inside code that torch.compile compiles, and what programs replace while they run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.executor.program.calls import seams


def made(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Any]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    loop = ts.Loop(step, budget="1MiB")
    return {
        "Program": ts.Program(step, budget="1MiB"),
        "Chain": ts.Chain([step], budget="1MiB"),
        "Loop": lambda x: loop(x, 1),
    }


@pytest.mark.parametrize("name", ["Program", "Chain", "Loop"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_code_around_a_call_may_be_compiled(name: str) -> None:
    """What the call runs is not; and budgets hold afterwards, in this process too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    run, x = made(weight)[name], torch.randn(4, 8)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return run(x + 1).sum() * 2 + run(x).sum()

    twice(x).backward()  # type: ignore[no-untyped-call]
    wanted, weight.grad = weight.grad, None
    for function in (torch.compile(twice, backend="eager"), torch.compile(twice, backend="eager")):
        function(x).backward()
        assert weight.grad is not None
        assert wanted is not None
        assert torch.equal(weight.grad, wanted)
        weight.grad = None
    if name != "Loop":
        assert torch.equal(torch.compile(run, backend="eager")(x), torch.tanh(x @ weight))
    with pytest.raises(BudgetError):
        ts.Program(lambda x: torch.tanh(x @ weight), budget=1)(x)
    torch._dynamo.reset()


def test_listeners_that_could_not_be_put_in_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.random.manual_seed, torch.overrides.has_torch_function

    def failing(self: Any, calling: Any) -> None:
        raise KeyboardInterrupt

    seams._SEAMS._made_of = None  # they are made anew
    with monkeypatch.context() as patch:
        patch.setattr(seams._Seams, "_hear_memory", failing)
        with pytest.raises(KeyboardInterrupt):
            ts.Program(torch.tanh, budget="1MiB")(torch.randn(3, requires_grad=True))
    assert (torch.random.manual_seed, torch.overrides.has_torch_function) == before
    with pytest.raises(BudgetError):
        ts.Program(lambda x: x.tanh().tanh(), budget=1)(torch.randn(300, requires_grad=True))
