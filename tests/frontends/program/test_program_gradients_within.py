"""`gradients_within=True`: one budget for a program's tape and for the gradients that its backward makes."""

import copy
import functools
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from side_by_side import compare
from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.program.program import Program
from tapestream.storage.meter import track_memory

WIDTH = 256
GRADIENT = WIDTH * WIDTH * 4  # bytes of one layer's


def network(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*(one for pair in pairs for one in pair))


def batch(requires: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(WIDTH, WIDTH, requires_grad=requires)


def least(program: Program, x: torch.Tensor) -> int:
    """The least budget in bytes with which a call works."""
    with pytest.raises(BudgetError) as error:
        program(x)
    assert error.value.least_nbytes is not None
    return error.value.least_nbytes


def made(program: Program, *args: torch.Tensor) -> list[int]:
    """By stage, the bytes of gradients that the plan says its backward makes."""
    for _ in range(2):
        program(*args).sum().backward()
    assert program.plan is not None
    return [cost.gradient_nbytes for cost in program.plan.profile.stages]


def test_each_counts_once_where_it_is_made_and_that_of_an_argument_where_that_is_used_last() -> None:
    net = network(3)
    x = batch(True)
    found = made(Program(lambda x: net(net(x)) + x, gradients_within=True), x)
    assert sum(found) == 4 * GRADIENT
    assert found[-1] == GRADIENT  # of the argument, in the sum at the end
    assert sum(found[: len(found) // 2 - 1]) == 0  # the first time through the net adds to what is there


def test_frozen_parameters_plain_arguments_and_uses_without_gradients_have_none() -> None:
    net = network(2)
    net[0].requires_grad_(False)
    target = network(2)  # as one of momentum contrast, which only ever runs without gradients

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(x)
        return net(x) - wanted

    assert sum(made(Program(loss, gradients_within=True), batch())) == GRADIENT


def test_the_default_leaves_gradients_out() -> None:
    net = network()
    assert sum(made(Program(net), batch())) == 0
    alone = least(Program(net, budget=1), batch())
    both = least(Program(net, budget=1, gradients_within=True), batch())
    assert alone < both
    assert both >= 8 * GRADIENT


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("planner", "more"),
    [
        pytest.param(planner, more, marks=[pytest.mark.full] * ((i + j) % 2))
        for i, planner in enumerate(["auto", "revolve", "rotor"])
        for j, more in enumerate([0.0, 0.2, 0.6, 2.0])
    ],
)
def test_measured_peaks_stay_within_the_budget(more: float, planner: str) -> None:
    net = network()
    low = least(Program(net, budget=1, gradients_within=True, planner=planner), batch(True))
    budget = low + int(more * 8 * GRADIENT)
    program, x, peaks = Program(net, budget=budget, gradients_within=True, planner=planner), batch(True), []
    for _ in range(5):
        net.zero_grad()
        x.grad = None
        gc.collect()
        with track_memory() as meter:
            program(x).sum().backward()
        peaks.append(meter.peak_nbytes)
    assert program.report is not None
    assert program.report.planned
    assert max(peaks) <= 1.05 * budget
    assert program.plan is not None
    assert program.plan.peak_nbytes <= budget


def test_until_gradients_are_made_their_room_is_the_tapes() -> None:
    """Where the tape takes as much as the gradients, less runs again than beside a budget that keeps both apart."""
    net, x = network(), batch()
    both = Program(net, budget=14 * GRADIENT, gradients_within=True)
    apart = Program(net, budget=14 * GRADIENT - 8 * GRADIENT)
    for program in (both, apart):
        for _ in range(4):
            program(x).sum().backward()
    assert both.report is not None
    assert apart.report is not None
    assert both.report.reruns < apart.report.reruns


@pytest.mark.parametrize("more", [0, 0.5, 1, 5])
def test_bits_of_plain_autograd(more: float) -> None:
    net = nn.Sequential(*network(6), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH))
    x = batch(True)

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = net(x) * net[0].weight  # used once more, at the end
        return found

    low = least(Program(run, budget=1, gradients_within=True), x)
    leaves: Sequence[torch.Tensor] = [x, *net.parameters()]
    compare(run, leaves, lambda: (x,), low + int(more * GRADIENT), calls=5, planner="auto", modules=[net],
            gradients_within=True, reruns=more < 5)  # fmt: skip


def test_second_backwards_and_copies() -> None:
    net, x = network(), batch()
    low = least(Program(net, budget=1, gradients_within=True), x)
    program = copy.deepcopy(Program(net, budget=low, gradients_within=True))
    assert program.gradients_within
    for _ in range(3):
        loss = program(x).square().sum()
        found = [torch.autograd.grad(loss, list(program.function.parameters()), retain_graph=True) for _ in range(2)]
        wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        for one in found:
            assert all(map(torch.equal, one, wanted))
        del loss


def test_explain_names_the_least_that_has_room_for_gradients() -> None:
    net = network()
    with pytest.raises(BudgetError) as error:
        Program(net, budget=8 * GRADIENT, gradients_within=True).explain(batch())
    assert (error.value.least_nbytes or 0) > 8 * GRADIENT
    explanation = Program(net, budget=error.value.least_nbytes, gradients_within=True).explain(batch())
    assert explanation.peak_nbytes <= (error.value.least_nbytes or 0)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("kind", ["einsum", "one einsum", "channels last", "shared"])
def test_gradients_that_autograd_copies_or_adds_on_their_way(kind: str) -> None:
    """Where a gradient does not lie in memory as its parameter does, both are there for a moment; where there is one
    already, so is the sum."""
    torch.manual_seed(0)
    if kind == "channels last":
        weights = [nn.Parameter(torch.randn(64, 64, 3, 3) / 30) for _ in range(3)]
        x = torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last)
    else:
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(4 if kind == "einsum" else 1)]
        weights *= 6 if kind == "shared" else 1
        x = torch.randn(16, WIDTH)

    def run(x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.tanh(nn.functional.conv2d(x, w, padding=1) if w.ndim == 4 else torch.einsum("bi,oi->bo", x, w))
        return x.sum()

    for share in (1.0, 1.1, 1.5):
        budget = int(share * least(Program(run, budget=1, gradients_within=True), x))
        program = Program(run, budget=budget, gradients_within=True)
        program(x)  # what its kinds of calls take cannot be measured inside a measurement
        for _ in range(3):
            for w in weights:
                w.grad = None
            gc.collect()
            with track_memory() as meter:
                program(x).backward()
            assert meter.peak_nbytes <= 1.05 * budget


def normalised(weights: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ (w / w.norm()))
    return x


def standardised(weights: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ ((w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)))
    return x


@pytest.mark.thinned(8)
@pytest.mark.parametrize("function", [normalised, standardised])
@pytest.mark.parametrize("within", [False, True])
def test_backward_of_what_is_computed_from_parameters_alone_fits_at_the_least_budget(
    function: Callable[..., torch.Tensor], within: bool
) -> None:
    """No room to try it: what is given from outside counts where a gradient passes through several kernels."""
    torch.manual_seed(0)
    weights, x = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(6)], torch.randn(32, WIDTH)
    run = functools.partial(function, weights)
    low = least(Program(run, budget=1, gradients_within=within), x)
    program = Program(run, budget=low, gradients_within=within)
    for _ in range(4):
        for w in weights:
            w.grad = None
        gc.collect()
        with track_memory() as meter:
            program(x).sum().backward()
        assert meter.peak_nbytes - (0 if within else 6 * GRADIENT) <= 1.05 * low


def test_a_parameter_used_often_has_its_sum_counted() -> None:
    """Autograd adds the gradients of its uses out of place: the old sum, the next one and what joins it."""
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(32, WIDTH)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(layer(x))
        return x

    low = least(Program(run, budget=1), x)
    program = Program(run, budget=low)
    for _ in range(4):
        layer.zero_grad()
        gc.collect()
        with track_memory() as meter:
            program(x).sum().backward()
        assert meter.peak_nbytes - GRADIENT <= 1.05 * low
