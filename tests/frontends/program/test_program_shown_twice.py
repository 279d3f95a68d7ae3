"""Memory of others that several tensors show, some of them used only after it has been written into."""

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import torch
from side_by_side import compare
from test_program_exact import given, leaf
from torch import nn
from torch.nn import functional

from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.program.program import Program

WIDTH, LAYERS = 16, 12
PLANNERS = "auto", "rotor"


class Sums(nn.Module):
    """Products, and two buffers that a program may write into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.one = nn.Buffer(torch.zeros(WIDTH))
        self.other = nn.Buffer(torch.zeros(WIDTH))


def budgets(function: Callable[[torch.Tensor], torch.Tensor], planner: str = "auto") -> list[int]:
    try:
        Program(function, budget=1, planner=planner)(leaf(64, WIDTH))
    except BudgetError as error:
        least = error.least_nbytes or 1
        return [int(least * share) for share in (1, 1.1, 1.3, 1.6, 2.2)]
    raise AssertionError("a byte is enough")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "part": lambda t: t[4:5],
    "turned": lambda t: t.view(4, 4).t().reshape(4, 4)[2:3, 1],
}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("late", [0, 1, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("shown", VIEWS.values(), ids=VIEWS)
def test_first_used_after_a_write(shown: Callable[[torch.Tensor], torch.Tensor], late: int) -> None:
    net = Sums()
    view = shown(net.one)

    def program(x: torch.Tensor) -> torch.Tensor:
        for k, product in enumerate(net.products):
            with torch.no_grad():
                net.one.add_(0.1 * x.mean(0))
            x = torch.tanh(product(x))
            if k >= late:
                x = x * (1 + view)
        return x

    for planner in PLANNERS:
        for k, budget in enumerate(budgets(program, planner)):  # nearly all that is saved is among the least
            compare(program, list(net.parameters()), given(leaf(64, WIDTH)), budget, calls=4, planner=planner,
                    modules=[net], reruns=k == 0)  # fmt: skip


def test_written_once_and_then_shown_by_another() -> None:
    """The one that was written into is not used any more when the other is used first."""
    net = Sums()
    view = net.one.view(4, 4)[1:2, 2]

    def program(x: torch.Tensor) -> torch.Tensor:
        for k, product in enumerate(net.products):
            if k in (1, 3):
                with torch.no_grad():
                    net.one.add_(x.mean(0))
            x = torch.tanh(product(x))
            if k > 6:
                x = x * (1 + view)
        return x

    for budget in budgets(program):
        compare(program, list(net.parameters()), given(leaf(64, WIDTH)), budget, calls=5, planner="auto", modules=[net])


@pytest.mark.parametrize("written", [True, False])
def test_memory_shared_by_way_of_an_array_is_refused_where_it_is_written_into(written: bool) -> None:
    net = Sums()
    view = torch.from_numpy(net.one.numpy())[2:3]

    def program(x: torch.Tensor) -> torch.Tensor:
        for product in net.products:
            if written:
                with torch.no_grad():
                    net.one.add_(0.1 * x.mean(0))
            x = torch.tanh(product(x)) * (1 + view) + net.one
        return x

    low, *_, high = budgets(program)
    compare(program, list(net.parameters()), given(leaf(64, WIDTH)), "1GiB", calls=3, planner="auto", modules=[net],
            reruns=False)  # fmt: skip
    if written:
        with pytest.raises(GradientError, match="shares memory with one that the program writes into"):
            Program(program, budget=low)(leaf(64, WIDTH)).sum().backward()
    else:
        compare(program, list(net.parameters()), given(leaf(64, WIDTH)), high, calls=3, planner="auto", modules=[net])


def test_now_one_and_now_the_other_of_two_is_read() -> None:
    """What is written into and never read is another one in another call of the same operations."""
    net = Sums()
    views = net.one.view(-1), net.other.view(-1)
    turn: Iterator[int] = iter(())

    def program(x: torch.Tensor) -> torch.Tensor:
        read = views[next(turn)]
        for product in net.products:
            with torch.no_grad():
                net.one.add_(0.1 * x.mean(0))
                net.other.add_(0.3 * x.mean(0))
            x = torch.tanh(product(x)) * (1 + read)
        return x

    for planner in PLANNERS:
        turn = cycle([0])
        for k, budget in enumerate(budgets(program, planner)):
            turn = cycle([0, 0, 0, 0, 1, 1, 0, 1])  # compare calls plain PyTorch eight times, and then the program
            compare(program, list(net.parameters()), given(leaf(64, WIDTH)), budget, calls=8, planner=planner,
                    modules=[net], reruns=k == 0)  # fmt: skip


@pytest.mark.full
def test_what_did_not_draw_draws() -> None:
    """Nor does the rate of a dropout tell calls apart that one plan serves."""
    net, mask = Sums(), torch.ones(64, WIDTH)
    rates: Iterator[float] = iter(())

    def program(x: torch.Tensor) -> torch.Tensor:
        rate = next(rates)
        for product in net.products:
            with torch.no_grad():
                functional.dropout(mask, rate, True, True)
            x = torch.tanh(product(x))
        return x

    for planner in PLANNERS:
        rates = cycle([0.5])
        for k, budget in enumerate(budgets(program, planner)):  # the last one holds all, at times
            rates = cycle([0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.5])
            compare(program, list(net.parameters()), given(leaf(64, WIDTH)), budget, calls=8, planner=planner,
                    reruns=k < 4)  # fmt: skip


@pytest.mark.parametrize("inplace", [torch.tensor(True), torch.tensor(False)])
def test_a_tensor_that_says_whether_to_write(inplace: torch.Tensor) -> None:
    net = Sums()

    def program(x: torch.Tensor) -> torch.Tensor:
        for product in net.products:
            x = functional.relu(product(x), inplace)  # type: ignore[arg-type]
        return x

    for budget in budgets(program):
        compare(program, list(net.parameters()), given(leaf(64, WIDTH)), budget, calls=3, planner="auto")


def test_statistics_used_in_evaluation_and_then_written_into_are_refused() -> None:
    """Plain PyTorch's backward of the evaluation reads what the training has left: no version tells it."""
    net, norm = Sums(), nn.BatchNorm1d(WIDTH)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = norm.eval()(x)
        for product in net.products:
            x = norm.train()(torch.tanh(product(x)))
        return x + y

    leaves = [*net.parameters(), *norm.parameters()]
    compare(program, leaves, given(leaf(64, WIDTH)), "1GiB", calls=3, planner="auto", modules=[norm],
            reruns=False)  # fmt: skip
    with pytest.raises(GradientError, match="statistics were used in evaluation and then written into"):
        Program(program, budget=budgets(program)[0])(leaf(64, WIDTH)).sum().backward()
