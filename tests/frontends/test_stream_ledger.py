"""Live calls of one streamed model share its budget."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from pairs import sgd
from streamable import Model
from streaming import gradients_of, least_for, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.frontends.module.stream import handle_of
from tapestream.models.gpt import GPT, GPTConfig
from tapestream.storage.meter import track_memory

ORDERS = ("first one first", "last one first", "together")


def tokens(length: int = 64) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (4, length)), torch.randint(0, 256, (4, length))


CASE = Model(lambda: GPT(GPTConfig(6, 64, 2, vocabulary=256, context=64)), tokens)


def two_calls(model: nn.Module, order: str) -> None:
    """Two forwards, then their backwards."""
    torch.manual_seed(5)
    first, second = model(*tokens()), model(*tokens())
    if order == "together":
        (first + second).backward()
    else:
        for loss in (first, second) if order == "first one first" else (second, first):
            loss.backward()


@pytest.fixture(params=["device", "disk"])
def options(request: Any, tmp_path: Path) -> dict[str, Any]:
    return options_of("auto", tmp_path / "home", request.param)


@pytest.fixture
def needed(options: dict[str, Any]) -> tuple[int, int]:
    """Device bytes of a step of one call with everything stored, and the bytes of that which two calls share."""
    with streamed(CASE, "1 TiB", **options) as model:
        sgd(model)
        prepared = handle_of(model).prepare_for(tokens(), {})
        return prepared.shared_nbytes + prepared.held_nbytes, prepared.shared_nbytes


@pytest.fixture
def narrow(options: dict[str, Any], needed: tuple[int, int]) -> Iterator[nn.Module]:
    """A model whose first call stores everything, and leaves half as much again to a second one."""
    full, shared = needed
    with streamed(CASE, full + (full - shared) // 2, **options) as model:
        sgd(model)
        yield model


def backward_after(first: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
    """Of the first call, when a second one has begun."""
    second = again()
    first.backward()
    second.backward()


def held_nbytes(model: nn.Module) -> int:
    """Bytes that the model holds on the device between steps, without gradients."""
    handle = handle_of(model)
    gradients = sum(p.nbytes for p in handle.outside_parameters() if p.requires_grad)
    return handle.pool.held_nbytes(ts.Tier.DEVICE) + outside_nbytes(handle) - gradients


def peak_nbytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Most bytes on the device while ``run`` makes gradients of the model, which go again."""
    model.zero_grad()
    gc.collect()
    before = held_nbytes(model)
    with track_memory() as meter:
        run()
        model.zero_grad()
    return before + meter.peak_nbytes


@pytest.mark.parametrize("order", ORDERS)
def test_a_second_live_call_is_planned_in_what_is_left(order: str, narrow: nn.Module) -> None:
    plain = CASE.model()
    two_calls(plain, order)
    two_calls(narrow, order)
    assert_same(gradients_of(plain), gradients_of(narrow))
    assert ts.report(narrow).plan.simulation.forwards > 6 == len(ts.report(narrow).plan.profile)
    allowed = handle_of(narrow).budget.device_nbytes
    assert allowed is not None
    assert peak_nbytes(narrow, lambda: two_calls(narrow, order)) <= allowed


def test_a_single_call_has_the_whole_budget_again(narrow: nn.Module) -> None:
    two_calls(narrow, "together")
    narrow(*tokens()).backward()
    assert ts.report(narrow).plan.simulation.forwards == 6


def test_with_room_for_both_calls_one_plan_serves(options: dict[str, Any], needed: tuple[int, int]) -> None:
    full, shared = needed
    with streamed(CASE, 2 * full - shared, **options) as model:
        sgd(model)
        first = model(*tokens())
        one = ts.report(model).plan
        second = model(*tokens())
        assert ts.report(model).plan is one
        (first + second).backward()


def test_too_little_left_names_the_live_call(options: dict[str, Any]) -> None:
    with streamed(CASE, 1, **options) as model:
        sgd(model)
        least_for(model, CASE)  # that is its budget now
        first = model(*tokens())
        with pytest.raises(BudgetError, match=r"held by 1 call\(s\) of this model whose backward has not run yet"):
            backward_after(first, lambda: model(*tokens()))
        del first
        model.zero_grad()  # at home on the device, gradients would count
        loss = model(*tokens())
        del loss
        model(*tokens()).backward()


@pytest.mark.thinned(9)
@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_budget_named_for_live_calls_holds_them(options: dict[str, Any], calls: int, micro_batches: int) -> None:
    if micro_batches > 1 and options.get("folder") is None:
        pytest.skip("sums of several calls and of micro-batches: see the next test")

    def losses(model: nn.Module) -> None:
        torch.manual_seed(5)
        for _ in range(micro_batches):
            sum(model(*tokens()) for _ in range(calls)).backward()

    plain = CASE.model()
    losses(plain)
    budget, refused = 1, 0
    while True:
        with streamed(CASE, budget, **options) as model:
            sgd(model)
            try:
                losses(model)
            except BudgetError as error:
                least, refused = error.least_nbytes or 0, refused + 1
                budget, before = least, budget
            else:
                assert_same(gradients_of(plain), gradients_of(model))
                break
        assert budget > before
    assert refused <= calls + micro_batches - 1


def test_sums_of_calls_that_are_planned_otherwise_are_plain_or_refused(tmp_path: Path) -> None:
    """In RAM alone, what is stored is left to autograd, which adds up gradients by itself."""

    def losses(model: nn.Module, calls: int, micro_batches: int) -> None:
        torch.manual_seed(5)
        for _ in range(micro_batches):
            sum(model(*tokens()) for _ in range(calls)).backward()

    with streamed(CASE, "1 TiB", device="cpu") as model:
        sgd(model)
        prepared = handle_of(model).prepare_for(tokens(), {})
        held, shared = prepared.held_nbytes, prepared.shared_nbytes
    seen = set()
    for calls, micro_batches in ((2, 1), (2, 2), (3, 1)):
        plain = CASE.model()
        losses(plain, calls, micro_batches)
        for tenths in range(6, 16, 3):
            with streamed(CASE, shared + held + (calls - 1) * held * tenths // 10, device="cpu") as model:
                sgd(model)
                try:
                    losses(model, calls, micro_batches)
                except BudgetError:
                    seen.add("too little")
                except GradientError as error:
                    seen.add("another order" if "added in another order" in str(error) else str(error))
                else:
                    assert_same(gradients_of(plain), gradients_of(model))
                    seen.add("the same")
    assert seen == {"too little", "another order", "the same"}
