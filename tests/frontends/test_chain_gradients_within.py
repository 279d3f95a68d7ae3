"""`gradients_within=True`: one budget for the tape and for the gradients that the backward makes."""

import gc

import pytest
import torch
from exact import modules_of, plain
from models import Stages
from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.chain import Chain
from tapestream.storage.meter import track_memory

WIDTH = 256
GRADIENT = WIDTH * WIDTH * 4  # bytes of one stage's, the bias left out


def stages(count: int = 8) -> Stages:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(count)]


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


def planned(count: int = 8, **options: object) -> Chain:
    net = Chain(stages(count), **options)  # type: ignore[arg-type]
    net(batch())
    return net


def test_gradients_count_once_where_they_are_made_and_that_of_the_argument_at_the_first_stage() -> None:
    first, second = stages(2)
    net = Chain([first, second, first, nn.Tanh()], gradients_within=True)
    net(batch())
    assert net.plan is not None
    assert [cost.gradient_nbytes for cost in net.plan.profile.stages] == [GRADIENT, GRADIENT, GRADIENT, 0]


def test_frozen_parameters_and_plain_arguments_have_none() -> None:
    net = Chain(stages(2), gradients_within=True)
    net.stages[0].requires_grad_(False)
    net(batch().detach())
    assert net.plan is not None
    assert [cost.gradient_nbytes for cost in net.plan.profile.stages] == [0, GRADIENT]


def test_the_default_leaves_gradients_out() -> None:
    net = planned(budget=8 * GRADIENT - 1)
    assert net.plan is not None
    assert not any(cost.gradient_nbytes for cost in net.plan.profile.stages)
    with pytest.raises(BudgetError):
        planned(budget=8 * GRADIENT - 1, gradients_within=True)


@pytest.mark.parametrize("share", [1.0, 0.8, 0.0])
def test_measured_peak_and_bits(share: float) -> None:
    full = planned(planner="store_all", gradients_within=True).plan
    assert full is not None
    budget = max(1, int(share * full.peak_nbytes))
    try:
        planned(budget=budget, gradients_within=True)
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        budget = error.least_nbytes
    net, x, theirs, y = planned(budget=budget, gradients_within=True), batch(), stages(), batch()
    assert net.plan is not None
    assert net.plan.peak_nbytes <= budget
    cotangent = torch.ones(WIDTH, WIDTH)
    net(x).backward(cotangent)
    plain(theirs)(y).backward(cotangent)
    for ours, other in zip([x, *net.parameters()], [y, *modules_of(theirs).parameters()], strict=True):
        assert ours.grad is not None
        assert other.grad is not None
        assert torch.equal(ours.grad, other.grad)
        ours.grad = None
    gc.collect()
    with track_memory() as meter:
        root = torch.autograd.graph.get_gradient_edge(net(x))
        torch.autograd.backward([root], [cotangent])
    # The simulator counts the caller's cotangent too, which was there before.
    assert 0.95 * net.plan.peak_nbytes - cotangent.nbytes <= meter.peak_nbytes <= 1.05 * net.plan.peak_nbytes


def test_what_a_backward_frees_is_set_off_against_gradients_that_it_makes() -> None:
    """Most of what the stage saves is gone before the gradient of its first product is made."""
    deep = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    extras = []
    for within in (True, False):
        net = Chain([deep], gradients_within=within)
        net(batch())
        assert net.plan is not None
        extras.append(net.plan.profile.stages[0].backward_extra_nbytes)
    assert extras[0] < 0 == extras[1]
