"""Backwards of several calls, and of parts of one: bit for bit plain PyTorch, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from pairs import CASE, Pair, batch, both, sgd
from streamable import MODELS, WIDTH, Chained, Model, dense, numbers
from streaming import budget_at, everything, loss_at, options_of, streamed
from torch import nn

from tapestream.errors import GradientError
from tapestream.frontends.module.stream import handle_of

# ----------------------------------------------------------------------------------------- backwards of several calls


def test_three_micro_batches(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for _ in range(3):
            loss_at(model, CASE).backward()

    both(pair, run)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_before_and_within_a_step(pair: Pair, to_none: bool) -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        loss_at(model, CASE).backward()
        loss = loss_at(model, CASE)
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        loss = loss_at(model, CASE)
        model.zero_grad(set_to_none=to_none)
        loss.backward()

    both(pair, run)


def test_two_forwards_then_two_backwards(crowd: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        first, second = loss_at(model, CASE), loss_at(model, CASE)
        first.backward()
        second.backward()

    both(crowd, run)


@pytest.mark.parametrize("before", [False, True])
def test_one_backward_through_several_calls(crowd: Pair, before: bool) -> None:
    def run(model: nn.Module, _: Any) -> None:
        if before:
            loss_at(model, CASE).backward()
        loss = loss_at(model, CASE) + loss_at(model, CASE) * loss_at(model, CASE)
        loss.backward()

    both(crowd, run)


def test_one_backward_through_several_calls_of_tied_blocks(tmp_path: Path) -> None:
    case = MODELS["repeated"]
    options = options_of("adversarial", tmp_path)
    budget = 4 * budget_at("least", case, sgd, **options)
    theirs = case.model()
    with streamed(case, budget, **options) as ours:

        def run(model: nn.Module, _: Any) -> None:
            loss_at(model, case).backward()
            (loss_at(model, case) + loss_at(model, case)).backward()

        both((theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)), run)


def test_a_call_on_what_another_returned(crowd: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        x = batch()
        y = model(x)
        model(x + y.mean()).square().mean().backward()

    both(crowd, run)


def test_a_call_gives_way_to_a_second_forward_where_backward_updates(eager: nn.Module) -> None:
    model = eager
    first, second = loss_at(model, CASE), loss_at(model, CASE)
    with pytest.raises(GradientError, match=r"second forward.*update='backward'.*use update='step'"):
        first.backward()
    second.backward()
    handle_of(model).optimizer.step()
    handle_of(model).optimizer.zero_grad()
    loss_at(model, CASE).backward()


# ---------------------------------------------------------------------------------------------- parts of a backward


class Peeking(Chained):
    """Also returns what the third block gave."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = x
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == 2:
                middle = x
        return self.after(x), middle


PEEKING = Model(lambda: Peeking(dense(), None, nn.Linear(WIDTH, 2)), numbers(3, WIDTH))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("part", ["inner", "both", "outer"])
def test_a_loss_on_an_inner_state(part: str, update: str, tmp_path: Path) -> None:
    options = options_of("adversarial", tmp_path)
    budget = budget_at("least", PEEKING, lambda m: sgd(m, update), **options)
    theirs = PEEKING.model()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    with streamed(PEEKING, budget, **options) as ours:
        ends = []
        for model, optimizer in ((theirs, plain), (ours, sgd(ours, update))):
            seed(3)
            for _ in range(3):
                out, middle = model(batch())
                terms = {"inner": [middle], "outer": [out], "both": [out, middle]}[part]
                sum(t.square().mean() for t in terms).backward()
                del out, middle, terms
                optimizer.step()
                optimizer.zero_grad()
            ends.append(everything(model))
        assert_same(*ends)


def test_gradients_of_the_input_alone(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        x = batch().requires_grad_()
        (given,) = torch.autograd.grad(model(x).square().mean(), x)
        y = (batch() + given).requires_grad_()
        model(y).square().mean().backward(inputs=[y])
        assert y.grad is not None
        (model(batch()) * y.grad.mean()).square().mean().backward()

    both(pair, run)


def test_gradients_of_the_input_beside_those_of_parameters(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        x = batch().requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        model(x.grad).square().mean().backward()

    both(pair, run)


def test_an_inner_parameter_cannot_be_asked_for(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        torch.autograd.grad(pair[1](batch()).sum(), pair[1].blocks[0].linear.weight)


def test_a_second_backward_raises(pair: Pair) -> None:
    loss = loss_at(pair[1], CASE)
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match=r"second time.*retain_graph=True is not supported"):
        loss.backward()
    pair[1].zero_grad()
    both(pair, lambda model, _: loss_at(model, CASE).backward())
