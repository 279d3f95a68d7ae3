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


def hook(x: torch.Tensor) -> torch.Tensor:
    y = x @ W
    y.register_hook(lambda g: g * 2)
    return y


def inner_grad(x: torch.Tensor) -> torch.Tensor:
    y = (x @ W).pow(2).sum()
    return torch.autograd.grad(y, W, create_graph=True)[0]


def inner_backward(x: torch.Tensor) -> torch.Tensor:
    (x @ W).sum().backward()
    return x @ W


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x @ W + torch.rand(4, 4, generator=torch.Generator())


def leaf_inside(x: torch.Tensor) -> torch.Tensor:
    return x @ W * torch.ones(4, requires_grad=True)


def argument_written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ W


def captured_written(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        W.mul_(1.0)
    return x @ W


def data_set(x: torch.Tensor) -> torch.Tensor:
    y = x @ W
    y.data = torch.zeros(4, 4)
    return y


def data_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ W)
    y.data.add_(1)
    return y


def node_read(x: torch.Tensor) -> torch.Tensor:
    y = x @ W
    assert y.grad_fn is not None
    return y


def module_hook(x: torch.Tensor) -> torch.Tensor:
    net = nn.Identity()
    net.register_full_backward_hook(lambda *given: None)
    return net(x @ W)


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        torch.ones(2) + 1
    return x @ W


REFUSED: list[tuple[Callable[[torch.Tensor], torch.Tensor], type[Exception], str]] = [
    (hook, GradientError, "register_hook"),
    (inner_grad, GradientError, "calls grad itself"),
    (inner_backward, GradientError, "calls backward itself"),
    (own_generator, InputError, r"torch\.Generator"),
    (leaf_inside, GradientError, "made inside the program"),
    (argument_written, GradientError, "mul_ changed in place"),
    (captured_written, GradientError, "mul_ changed in place"),
    (data_set, InputError, r"sets \.data"),
    (data_written, GradientError, r"through its \.data"),
    (node_read, GradientError, "grad_fn"),
    (module_hook, GradientError, "full backward hook"),
    (inference, InputError, "inference mode"),
]


@pytest.mark.parametrize(("function", "kind", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_by_name(function: Callable[..., Any], kind: type[Exception], words: str) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(kind, match=words):
        Program(function, budget="1MiB")(x * 1.0)


def test_a_second_backward() -> None:
    y = Program(lambda: (W * 2).sin(), budget="1MiB")().sum()
    y.backward(retain_graph=True)
    with pytest.raises(GradientError, match="a second time"):
        y.backward()


def test_a_gradient_of_a_gradient() -> None:
    y = Program(lambda: W.sin(), budget="1MiB")().sum()
    with pytest.raises(GradientError, match="create_graph"):
        torch.autograd.grad(y, W, create_graph=True)


def test_a_captured_tensor_changed_after_the_call() -> None:
    scale = torch.ones(4)
    y = Program(lambda: (W * scale).sin(), budget="1MiB")().sum()
    scale.add_(1)
    with pytest.raises(GradientError, match="modified in place after"):
        y.backward()


def test_one_of_two_results_over_the_same_memory_changed() -> None:
    def program() -> Any:
        y = W * 2
        return y, y[0]

    y, row = Program(program, budget="1MiB")()
    row.mul_(3)
    with pytest.raises(GradientError, match="shares its memory"):
        y.sum().backward()


def test_a_tensor_that_escaped() -> None:
    escaped = []

    def program() -> torch.Tensor:
        y = W.sin()
        escaped.append(y * y)
        return y.cos()

    Program(program, budget="1MiB")()
    with pytest.raises(GradientError, match="reached the inside of the program"):
        escaped[0].sum().backward()


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
    assert run._live > 0
    first.sum().backward()
    assert run._live == 0
    second = run()
    del second
    assert run._live == 0
    W.grad = None


def test_without_gradients_the_function_runs_as_it_is() -> None:
    run = Program(lambda x: x * 2, budget="1MiB")
    with torch.no_grad():
        assert not run(W).requires_grad
    assert not run(torch.ones(2)).requires_grad
    assert run.report is None
