"""Buffers that a program writes into and never reads: replays leave them alone, and every bit stays as it was."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import compare
from test_program_exact import given, leaf
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.executor.program.record.record import Record
from tapestream.frontends.program.program import Program
from tapestream.storage.meter import track_memory

WIDTH = 16


class Normed(nn.Module):
    """Ten products, each with a normalisation behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(10))

    def forward(self, x: torch.Tensor, until: int = 10) -> torch.Tensor:
        for product, norm in list(zip(self.products, self.norms, strict=True))[:until]:
            x = torch.relu(norm(product(x)))
        return x


def record_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Record:
    """Of one call, of which not everything fits."""
    run = Program(function, budget="1 MiB")
    y = run(leaf(8, WIDTH) * 1.0)
    assert y.requires_grad
    replays = run._replays() if run._replays is not None else None
    assert replays is not None
    return replays.record


def buffers_unread(record: Record, *buffers: Any) -> list[bool]:
    storages = {id(one.tensor): one.storage for one in record.externals}
    return [storages[id(buffer)] in record.unread.storages for buffer in buffers]


def names(record: Record, operations: frozenset[int]) -> list[str]:
    return sorted({record.pattern(k).function.__name__ for k in operations})


def test_statistics_and_counters_in_training_are_never_read() -> None:
    network = Normed()
    record = record_of(network)
    assert len(record.unread.storages) == 30
    assert len(record.unread.idle) == 10
    assert names(record, record.unread.idle) == ["add_"]


def test_statistics_in_evaluation_are_read_and_not_written() -> None:
    network = Normed().eval()
    record = record_of(network)
    assert buffers_unread(record, network.norms[0].running_mean, network.norms[0].running_var) == [False, False]
    assert not record.writes


@pytest.mark.parametrize("first", [torch.nn.functional.batch_norm, torch.batch_norm, torch.native_batch_norm])
def test_every_way_to_call_a_normalisation(first: Callable[..., Any]) -> None:
    product, mean, var = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)
    low, high = torch.zeros(WIDTH), torch.ones(WIDTH)

    def program(x: torch.Tensor, training: bool) -> torch.Tensor:
        x = product(x)
        if first is functional.batch_norm:
            by_name = functional.batch_norm(x, running_mean=low, running_var=high, training=training)
            return first(by_name, mean, var, None, None, training)
        more = (True,) if first is torch.batch_norm else ()
        x = first(x, None, None, mean, var, training, 0.1, 1e-5, *more)
        return x if isinstance(x, torch.Tensor) else x[0]

    for training in (True, False):
        record = record_of(lambda x, training=training: program(x, training))  # type: ignore[misc]
        assert buffers_unread(record, mean, var) == [training, training]
        if first is functional.batch_norm:
            assert buffers_unread(record, low, high) == [training, training]


def test_what_is_read_later_counts_as_read() -> None:
    network = Normed()
    mean, var = network.norms[3].running_mean, network.norms[3].running_var
    assert isinstance(mean, torch.Tensor)
    record = record_of(lambda x: network(x) * mean)
    assert buffers_unread(record, mean, var) == [False, True]


def test_what_only_writers_of_what_is_read_read_counts_as_read() -> None:
    network, first, second, third = Normed(), torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def program(x: torch.Tensor) -> torch.Tensor:
        first.add_(1)
        second.add_(first)
        third.add_(first)
        return network(x) * second

    assert buffers_unread(record_of(program), first, second, third) == [False, False, True]


def test_statistics_that_something_else_writes_into_too_count_as_read() -> None:
    """Backward may have to say so, as plain PyTorch does."""
    network = Normed()
    mean, var = network.norms[3].running_mean, network.norms[3].running_var
    assert isinstance(mean, torch.Tensor)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = network(x)
        mean.mul_(0.5)
        return x

    assert buffers_unread(record_of(program), mean, var) == [False, True]


def test_what_is_shown_by_a_view_or_saved_counts_as_read() -> None:
    network, shown, scaled = Normed(), torch.zeros(4), torch.ones(8, WIDTH)

    def program(x: torch.Tensor) -> torch.Tensor:
        shown.view(2, 2).add_(1)
        scaled.mul_(1.01)
        return network(x) * scaled

    assert buffers_unread(record_of(program), shown, scaled) == [False, False]


def test_bits_of_a_network_in_training() -> None:
    network = Normed()
    for planner in ("auto", "revolve", "rotor"):
        compare(network, list(network.parameters()), given(leaf(8, WIDTH)), calls=4, planner=planner, modules=[network])


def test_a_program_that_reads_at_its_end_what_the_planned_one_never_did() -> None:
    network = Normed()
    mean = network.norms[2].running_mean
    assert isinstance(mean, torch.Tensor)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = network(x)
        return x * mean.clone() if random.random() < 0.5 else x

    for planner in ("auto", "revolve"):
        compare(program, list(network.parameters()), given(leaf(8, WIDTH)), calls=8, planner=planner, modules=[network])


@pytest.mark.full
def test_a_program_that_reads_on_its_way_what_the_planned_one_never_did() -> None:
    """With as many operations of the same kinds on tensors of the same shapes: only the end tells."""
    network, other = Normed(), torch.ones(WIDTH)
    mean = network.norms[2].running_mean
    assert isinstance(mean, torch.Tensor)

    def program(x: torch.Tensor) -> torch.Tensor:
        # Both are there from the beginning, so that storages have the same numbers.
        torch.add(other, mean)
        x = network(x, 8)
        x = x * (mean if random.random() < 0.5 else other).clone()
        for product, norm in zip(network.products, network.norms, strict=True):
            x = torch.relu(norm(product(x)))
        return x

    for planner in ("auto", "revolve"):
        compare(program, list(network.parameters()), given(leaf(8, WIDTH)), calls=8, planner=planner, modules=[network])


class Counting(TorchDispatchMode):
    """How often which kernel is called."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_restart_checkpoints_hold_none_of_it_and_counters_are_not_counted_again() -> None:
    network = Normed()
    x = leaf(8, WIDTH)
    with track_memory() as meter:
        y = network(x * 1.0)
    assert y.requires_grad
    run = Program(network, budget=int(0.6 * meter.end_nbytes))
    for _ in range(4):
        x.grad = None
        network.zero_grad()  # so that nothing is added to gradients
        y = run(x * 1.0)
        replays = run._replays() if run._replays is not None else None
        assert replays is not None
        assert all(number >= 0 for kept in replays.engine.kept.values() for number in kept.entries)
        with Counting() as counting:
            y.sum().backward()
    assert run.report is not None
    assert run.report.reruns > 0
    assert counting.counts["native_batch_norm"] > 0
    assert not counting.counts["add_"]


def test_a_large_average_that_the_program_keeps_costs_one_copy() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(12)]
    average = torch.zeros(256, 64)

    def program(x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
            with torch.no_grad():
                average.lerp_(x, 0.1)
        return x.square().mean()

    x = leaf(256, 64)
    budget = 10 * x.nbytes
    run = Program(program, budget=budget)
    for _ in range(4):
        for w in (*weights, x):
            w.grad = torch.zeros_like(w)
        with track_memory() as meter:
            run(x).backward()
        assert meter.peak_nbytes <= 1.05 * budget + weights[0].nbytes + x.nbytes
    compare(program, weights, given(leaf(256, 64)), calls=3, budget=budget, planner="auto")
