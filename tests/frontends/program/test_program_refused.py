"""What replays could not reproduce is refused by name; never a wrong gradient."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.program.program import Program

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
ROWS = W[:]


def inner_grad(x: torch.Tensor) -> torch.Tensor:
    y = (x @ W).pow(2).sum()
    return torch.autograd.grad(y, W, create_graph=True)[0]


def inner_backward(x: torch.Tensor) -> torch.Tensor:
    (x @ W).sum().backward()
    return x @ W


def argument_written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ W


def captured_written(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        ROWS.mul_(1.0)
    return x @ ROWS


def data_set(x: torch.Tensor) -> torch.Tensor:
    y = x @ W
    y.data = torch.zeros(4, 4)
    return y


def data_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ W)
    y.data.add_(1)
    return y


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        torch.ones(2) + 1
    return x @ W


REFUSED: list[tuple[Callable[[torch.Tensor], torch.Tensor], type[Exception], str]] = [
    (inner_grad, InputError, "called inside with create_graph=True"),
    (inner_backward, GradientError, "calls backward itself"),
    (argument_written, GradientError, "mul_ changed in place"),
    (captured_written, GradientError, "mul_ changed in place"),
    (data_set, InputError, r"sets \.data"),
    (data_written, GradientError, r"through its \.data"),
    (inference, InputError, "inference mode"),
]


@pytest.mark.parametrize(("function", "kind", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_by_name(function: Callable[..., Any], kind: type[Exception], words: str) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(kind, match=words):
        Program(function, budget="1MiB")(x * 1.0)


def test_a_captured_tensor_changed_after_the_call() -> None:
    scale = torch.ones(4)
    y = Program(lambda: (W * scale).sin(), budget="1MiB")().sum()
    scale.add_(1)
    with pytest.raises(GradientError, match="modified by an inplace operation"):
        y.backward()


def test_a_captured_tensor_changed_before_a_replay() -> None:
    scale = torch.ones(4)

    def program() -> torch.Tensor:
        y = W
        for _ in range(30):
            y = (y * scale).sin() @ W
        return y

    y = Program(program, budget=2_000)().sum()
    scale.add_(1)
    with pytest.raises(GradientError, match="modified in place after"):
        y.backward()


def test_values_that_leave_torch_and_come_back_are_constants() -> None:
    def program() -> torch.Tensor:
        y = W.sin()
        numbers = y.detach().numpy().copy()
        scale = torch.from_numpy(numpy.abs(numbers)) + y.max().item()
        return y * scale * torch.tensor(y.detach().tolist())

    W.grad = None
    program().pow(2).sum().backward()
    expected, W.grad = W.grad, None
    Program(program, budget="1MiB")().pow(2).sum().backward()
    assert W.grad is not None
    assert torch.equal(W.grad, expected)
    W.grad = None


def test_a_budget_that_is_too_small_says_what_suffices() -> None:
    def program() -> torch.Tensor:
        y = W
        for _ in range(20):
            y = torch.tanh(y @ W)
        return y

    with pytest.raises(BudgetError, match="the least found to work") as refusal:
        Program(program, budget=100)()
    least = refusal.value.least_nbytes
    assert least is not None
    Program(program, budget=least)().sum().backward()
    W.grad = None


def test_concurrent_calls_share_the_budget() -> None:
    def program() -> torch.Tensor:
        y = W
        for _ in range(60):
            y = torch.tanh(y @ W)
        return y

    run = Program(program, budget=20_000)
    first = run()
    assert sum(run._live.nbytes.values()) > 0
    first.sum().backward()
    assert sum(run._live.nbytes.values()) == 0
    second = run()
    assert sum(run._live.nbytes.values()) > 0
    del second
    assert sum(run._live.nbytes.values()) == 0
    W.grad = None


def test_without_gradients_the_function_runs_as_it_is() -> None:
    run = Program(lambda x: x * 2, budget="1MiB")
    with torch.no_grad():
        assert not run(W).requires_grad
    assert not run(torch.ones(2)).requires_grad
    assert run.report is None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("opaque", [False, True])
def test_what_torch_jit_has_made_is_refused_by_name(opaque: bool) -> None:
    layer = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    traced = torch.jit.trace(torch.tanh, torch.ones(4, 4))
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(GradientError, match=r"forward, made by torch\.jit.* call the function or module that it was"):
        Program(lambda x: layer(x) @ W, budget="1MiB", opaque=[layer] if opaque else ())(x * 1.0)
    with pytest.raises(GradientError, match=r"made by torch\.jit"):
        Program(lambda x: traced(x) @ W, budget="1MiB")(x * 1.0)
    assert torch.equal(traced(x), torch.tanh(x))
