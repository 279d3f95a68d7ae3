"""What no torch call shows: it is refused by name as soon as something would have to run again, or done right."""

import copy
import gc
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from side_by_side import compare, least
from torch import nn

from tapestream.errors import GradientError, InputError
from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, X = nn.Parameter(torch.randn(16, 16) / 4), torch.randn(8, 16).requires_grad_()


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def often(body: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = body(x)
        return x

    return program


def tight(program: Callable[..., Any]) -> Program:
    return Program(program, budget=least(program, [W, X], given, 0), planner="revolve")


class Counts(torch.autograd.Function):
    """Writes into a tensor that it is not given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hidden: Any) -> torch.Tensor:
        hidden.count.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2, None


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = random.random() + float(numpy.random.rand())
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.scale


class Counter:
    def __init__(self) -> None:
        self.count = torch.zeros(())


def counted(x: torch.Tensor) -> torch.Tensor:
    counter = Counter()
    for _ in range(6):
        x = Counts.apply(torch.tanh(x @ W), counter)  # type: ignore[no-untyped-call]
    return x


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(Draws.apply(x @ W))  # type: ignore[no-untyped-call, no-any-return]


def written_by_a_thread(x: torch.Tensor) -> torch.Tensor:
    scale = torch.ones(16) * 2
    thread = threading.Thread(target=lambda: scale.mul_(0.5))
    thread.start()
    thread.join()
    for _ in range(8):
        x = torch.tanh(x @ W * scale)
    return x


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (counted, "not among its arguments"),
    (often(drawn), "Python's or NumPy's generator"),
    (written_by_a_thread, "without a torch call"),
]


@pytest.mark.parametrize(("program", "words"), REFUSED)
def test_refused_where_it_would_run_again_and_right_where_not(program: Callable[..., Any], words: str) -> None:
    with pytest.raises(GradientError, match=words):
        tight(program)(*given()).sum().backward()
    random.seed(0)
    numpy.random.seed(0)
    expected = torch.autograd.grad(program(*given()).sum(), W)
    random.seed(0)
    numpy.random.seed(0)
    found = torch.autograd.grad(Program(program, budget="1MiB")(*given()).sum(), W)
    assert torch.equal(found[0], expected[0])


def test_a_function_that_uses_hidden_tensors_that_stay_as_they_are() -> None:
    mask = torch.rand(16) > 0.3

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            own = torch.zeros_like(x)
            own.add_(x * mask)
            ctx.kept = own * 2
            return own

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * mask * (1 + 0 * ctx.kept)

    found = compare(often(lambda x: torch.tanh(Masked.apply(x @ W))), [W, X], given)  # type: ignore[no-untyped-call]
    assert found.report is not None
    assert found.report.reruns > 0


@pytest.mark.parametrize("change", [lambda w: torch.ones_like(w), lambda w: w.data.double().float() + 1])
def test_a_parameter_over_other_memory_by_the_time_of_a_replay(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    w = nn.Parameter(W.detach().clone())
    y = tight(often(lambda x: torch.tanh(x @ w)))(*given()).sum()
    w.data = change(w)
    with pytest.raises(GradientError, match="was replaced"):
        y.backward()


def test_memory_put_behind_a_tensor() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(16)
        scale.set_(torch.zeros(16))  # type: ignore[call-overload]
        return x @ W * scale

    with pytest.raises(InputError, match="set_ changes the memory"):
        Program(program, budget="1MiB")(*given())
    assert "set_" not in vars(torch.Tensor)


def test_arrays_that_become_tensors_inside_are_those_of_the_first_run() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for k in range(8):
            array = numpy.full(16, 1 + 0.1 * k, dtype=numpy.float32)
            x = torch.tanh(x @ W + torch.from_numpy(array))
            array *= 0.5  # changes nothing: a sum has saved none of its terms
        return x

    found = compare(program, [W, X], given)
    assert found.report is not None
    assert found.report.reruns > 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_inside() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(torch.sparse.mm(torch.relu(x).to_sparse(), W) + x)
        return x

    with torch.sparse.check_sparse_tensor_invariants():
        compare(program, [W, X], given)


def test_in_place_through_torch_ops() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        count = torch.ones(16)
        for _ in range(8):
            x = torch.tanh(x @ W + count)
            torch.ops.aten.mul_.Scalar(count, 0.9)
        return x

    compare(program, [W, X], given)


def test_a_result_that_is_held_gives_its_budget_back() -> None:
    program = often(lambda x: torch.tanh(x @ W))
    run = Program(program, budget=2 * least(program, [W, X], given, 0), planner="revolve")
    gc.collect()
    gc.disable()
    try:
        results = []
        for _ in range(4):
            results.append(run(*given()))
            results[-1].sum().backward()
            assert sum(run._live.nbytes.values()) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_begins_anew(way: Callable[[Program], Program]) -> None:
    run = Program(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), budget="1MiB")
    waiting = run(X)
    twin = way(run)
    assert twin.report is None
    twin(X).sum().backward()
    assert sum(twin._live.nbytes.values()) == 0
    assert sum(run._live.nbytes.values()) > 0
    waiting.sum().backward()
