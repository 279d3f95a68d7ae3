"""Orders of forwards, backwards and optimizer steps that have gone wrong in trials with streamed models."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import AMPLE, KNOBS, TIGHT, streamed
from exact import Trace, assert_same, copy_of, seed
from streaming import everything, gradients_of
from zoo import FAMILIES, loss_of

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, TapestreamError
from tapestream.frontends.module.stream import handle_of

BERT = FAMILIES["bert"]
Pair = tuple[tuple[Any, Any], tuple[Any, Any]]
Run = Callable[[Any, Any], Trace]


@pytest.fixture(params=[TIGHT, AMPLE], ids=["tight", "ample"])
def pair(request: Any, tmp_path: Path) -> Iterator[Pair]:
    """A plain model and a streamed one, each with its optimizer; twice the least, for two calls at once."""
    theirs = BERT.model()
    ours = copy.deepcopy(theirs)
    with streamed(ours, BERT, request.param, tmp_path / "home") as both:
        handle = handle_of(ours)
        handle.budget = ts.Budget(2 * handle.budget.device_nbytes)
        if request.param.tight:
            ts.report(ours)  # its sums begin here
        yield (theirs, torch.optim.AdamW(theirs.parameters(), **KNOBS)), both


def loss(model: Any, number: int) -> torch.Tensor:
    return loss_of(model, BERT.batch(number))


def step(model: Any, optimizer: Any, number: int = 5) -> Trace:
    """One ordinary step, and what it leaves behind."""
    loss(model, number).backward()
    found = gradients_of(model)
    optimizer.step()
    optimizer.zero_grad()
    return found | everything(model, "after ")


def on_disk(ours: Any) -> bool:
    return bool(handle_of(ours).store.home is ts.Tier.DISK)


def assert_moved(ours: Any, times: int) -> None:
    """All parameters of the blocks came from the disk so many times since the last report, if that is their home."""
    if on_disk(ours):
        there = sum(p.nbytes for block in BERT.blocks(ours) for p in block.parameters())
        assert ts.report(ours).bytes_moved[ts.Tier.DISK, ts.Tier.DEVICE] >= times * there


def compare(pair: Pair, run: Run) -> None:
    """``run`` on both, and an ordinary step afterwards, leave the same bits."""
    traces = []
    for model, optimizer in pair:
        seed(3)
        trace = run(model, optimizer)
        optimizer.zero_grad()
        traces.append(trace | {f"later {name}": tensor for name, tensor in step(model, optimizer).items()})
    assert_same(*traces)
    assert_moved(pair[1][0], 1)  # what room is left for stays


def refused(pair: Pair, run: Run, error: type[TapestreamError], match: str) -> None:
    """Plain PyTorch does it, the streamed model raises ``error``; an ordinary step afterwards is exact."""
    (theirs, plain), (ours, optimizer) = pair
    run(theirs, plain)
    with pytest.raises(error, match=match):
        run(ours, optimizer)
    plain.zero_grad()
    optimizer.zero_grad()
    compare(pair, lambda model, optimizer: {})


def test_a_step_between_a_forward_and_its_backward(pair: Pair) -> None:
    """The weights that the first forward has used are gone: plain PyTorch raises, and so must we."""

    def run(model: Any, optimizer: Any) -> Trace:
        first, second = loss(model, 0), loss(model, 1)
        second.backward()
        trace = gradients_of(model)
        optimizer.step()
        with pytest.raises(RuntimeError):
            first.backward()
        return trace

    compare(pair, run)


def test_a_step_while_another_forward_is_alive(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        waiting = loss(model, 0)
        trace = step(model, optimizer, 1)
        trace |= {f"second {name}": tensor for name, tensor in step(model, optimizer, 2).items()}
        return trace | {"waiting": copy_of(waiting)}

    compare(pair, run)


def test_two_forwards_and_then_their_backwards(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        first, second = loss(model, 0), loss(model, 1)
        first.backward()
        second.backward()
        return gradients_of(model)

    compare(pair, run)


def test_a_step_on_a_retained_graph(pair: Pair) -> None:
    """The graph's weights are gone after the step: plain PyTorch raises, and so must we."""

    def run(model: Any, optimizer: Any) -> Trace:
        kept = loss(model, 0)
        kept.backward(retain_graph=True)
        trace = gradients_of(model)
        optimizer.step()
        with pytest.raises(RuntimeError):
            kept.backward()
        return trace

    compare(pair, run)


def test_a_retained_graph(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        kept = loss(model, 0)
        kept.backward(retain_graph=True)
        kept.backward()
        return gradients_of(model)

    if on_disk(pair[1][0]):
        refused(pair, run, GradientError, "differentiated a second time")
    else:
        compare(pair, run)


def test_micro_batches_within_one_autocast(pair: Pair) -> None:
    """Autocast keeps casts of weights until its context ends, while streamed weights leave and come back."""
    handle = handle_of(pair[1][0])
    handle.budget = ts.Budget(handle.budget.device_nbytes // 2)  # the least: no block waits for the next call

    def run(model: Any, optimizer: Any) -> Trace:
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(3):
                loss(model, number).backward()
        if model is pair[1][0]:
            assert_moved(model, 5)  # with each call the weights, with all but the first the gradients so far
        return gradients_of(model)

    compare(pair, run)


def test_looking_without_gradients_within_the_autocast_of_a_step(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        with torch.autocast("cpu", torch.bfloat16):
            trained = loss(model, 0)
            with torch.no_grad():
                looked = loss(model, 1)
        trained.backward()
        trace = gradients_of(model) | {"looked": copy_of(looked)}
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return trace | {"after": copy_of(loss(model, 1))}

    compare(pair, run)


def sum_within_one_autocast(model: Any, optimizer: Any) -> Trace:
    """Plain PyTorch adds such gradients in bfloat16, on the casts that both forwards share."""
    with torch.autocast("cpu", torch.bfloat16):
        both = loss(model, 0) + loss(model, 1)
    both.backward()
    return gradients_of(model)


@pytest.mark.parametrize("pair", [TIGHT], ids=["tight"], indirect=True)
def test_two_forwards_within_one_autocast_that_do_not_fit(pair: Pair) -> None:
    refused(pair, sum_within_one_autocast, BudgetError, r"held by 1 call\(s\) of this model whose backward has not run")


@pytest.mark.parametrize("pair", [TIGHT, AMPLE], ids=["tight", "ample"], indirect=True)
def test_two_forwards_within_one_autocast_and_one_backward(pair: Pair) -> None:
    if on_disk(pair[1][0]):
        handle = handle_of(pair[1][0])
        handle.budget = ts.Budget(2 * handle.budget.device_nbytes)
        refused(pair, sum_within_one_autocast, GradientError, "two calls of one model .* within one autocast")
    else:
        compare(pair, sum_within_one_autocast)


def sum_of_two_autocasts(model: Any, optimizer: Any) -> Trace:
    total = torch.zeros(())
    for number in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            total = total + loss(model, number)
    total.backward()
    return gradients_of(model)


def sum_within_one_autocast_without_its_cache(model: Any, optimizer: Any) -> Trace:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        both = loss(model, 0) + loss(model, 1)
    both.backward()
    return gradients_of(model)


def two_backwards_of_one_autocast(model: Any, optimizer: Any) -> Trace:
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss(model, 0), loss(model, 1)]
    for one in losses:
        one.backward()
    return gradients_of(model)


@pytest.mark.parametrize(
    "run", [sum_of_two_autocasts, sum_within_one_autocast_without_its_cache, two_backwards_of_one_autocast]
)
@pytest.mark.parametrize("pair", [TIGHT], ids=["tight"], indirect=True)
def test_ways_around_two_forwards_within_one_autocast(pair: Pair, run: Run) -> None:
    handle = handle_of(pair[1][0])
    handle.budget = ts.Budget(2 * handle.budget.device_nbytes)
    compare(pair, run)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("pair", [TIGHT], ids=["tight"], indirect=True)
def test_gradients_of_chosen_parameters(pair: Pair, unused: bool) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        chosen = [p for name, p in model.named_parameters() if "layer.1" in name or "embeddings" in name]
        found = torch.autograd.grad(loss(model, 0), chosen, allow_unused=unused)
        assert all(p.grad is None for p in model.parameters())
        return {str(number): copy_of(gradient) for number, gradient in enumerate(found)}

    refused(pair, run, GradientError, "gradients of chosen parameters")


@pytest.mark.parametrize("pair", [TIGHT], ids=["tight"], indirect=True)
def test_a_backward_for_chosen_parameters(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        loss(model, 0).backward(inputs=[p for name, p in model.named_parameters() if "layer.1" in name])
        return gradients_of(model)

    refused(pair, run, GradientError, "gradients of chosen parameters")


def test_hooks_of_parameters_see_each_gradient_once(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        calls: dict[str, int] = dict.fromkeys([name for name, _ in model.named_parameters()], 0)

        def counted(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            def hook(gradient: torch.Tensor) -> torch.Tensor:
                calls[name] += 1
                return 2 * gradient

            return hook

        handles = [p.register_hook(counted(name)) for name, p in model.named_parameters()]
        loss(model, 0).backward()
        for handle in handles:
            handle.remove()
        assert set(calls.values()) == {1}
        return gradients_of(model)

    compare(pair, run)


def test_hooks_after_accumulation(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> Trace:
        trace: Trace = {}
        names = {id(p): name for name, p in model.named_parameters()}

        def keep(p: torch.Tensor) -> None:
            trace[names[id(p)]] = copy_of(p.grad)

        handles = [p.register_post_accumulate_grad_hook(keep) for p in model.parameters()]
        loss(model, 0).backward()
        for handle in handles:
            handle.remove()
        assert len(trace) == len(names)
        return dict(sorted(trace.items()))

    compare(pair, run)
