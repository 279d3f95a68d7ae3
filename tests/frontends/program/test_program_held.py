"""What operations have made themselves of what they save, kept so that they do not run again; stretches made one."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from side_by_side import compare, fix_seconds
from test_program_needed import tape_of
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.executor.program.record.record import MIXED
from tapestream.executor.program.replay.needed import RUN, SAVE, SKIP, Needed
from tapestream.frontends.program.program import Program
from tapestream.ir import Backward, Record
from tapestream.storage.meter import track_memory

WIDTH, TOKENS, BLOCKS = 32, 32, 12
_SECONDS = {"linear": 4.0, "scaled_dot_product_attention": 10.0, "layer_norm": 1.0, "gelu": 1.0}
_SECONDS |= {"conv2d": 4.0, "batch_norm": 2.0}


class Kernels(TorchDispatchMode):
    """Counts what is computed, by name."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def seconds_that_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seconds(monkeypatch, _SECONDS)


def attention_blocks() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind()
            seen = functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def convolutions(blocks: int) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.norm(self.conv(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def backward_kernels(run: Program, x: torch.Tensor, budget: int) -> Counter[str]:
    """What one call's backward computes; its peak is within the budget."""
    with track_memory() as meter:
        y = run(x)
        loss = y.sum()
        with Kernels() as kernels:
            loss.backward()
    gradients = sum(p.nbytes for p in run.function.parameters()) if isinstance(run.function, nn.Module) else 0
    assert meter.peak_nbytes <= 1.05 * budget + gradients + 2 * x.nbytes
    return kernels.counts


def test_an_attention_of_which_the_sums_are_kept_does_not_run_again() -> None:
    model, x = attention_blocks(), torch.randn(2, TOKENS, WIDTH)
    budget = int(0.4 * tape_of(model, x))
    leaves = list(model.parameters())
    run = compare(model, leaves, lambda: (x,), budget, calls=4, planner="auto")
    assert run._last is not None
    held = run._last.holding
    assert run._last.reversal is not None
    assert run._last.reversal.reruns >= 3
    record_of = run(x)  # a live call, to see its record
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record = replays.record
    attentions = [k for k in held.saves if record.pattern(k).function.__name__ == "scaled_dot_product_attention"]
    assert len(attentions) >= 3
    assert all(number in held.values for k in attentions for number in record.results_of(k))
    again = {k for a, b in _again(run) for k in range(a, b)}
    names = [record.pattern(k).function.__name__ for k in again]
    rerun = names.count("scaled_dot_product_attention") - len(again.intersection(attentions))
    del replays, record_of
    model.zero_grad()
    counts = backward_kernels(run, x, budget)
    assert counts["_scaled_dot_product_flash_attention_for_cpu"] == rerun
    explained = run.explain(x)
    assert run.plan is not None
    assert explained.peak_nbytes == run.plan.peak_nbytes
    inner = [row for row in explained.rows if row.operation == "scaled_dot_product_attention"]
    assert sum(row.fate == "restart checkpoint" for row in inner) >= 2 * len(attentions)


def _again(run: Program) -> list[tuple[int, int]]:
    """The operations that a call's backward runs again, as stretches."""
    assert run._last is not None
    assert run._last.reversal is not None
    cuts = run._last.cuts
    return [(cuts[a.stage], cuts[a.stage + 1]) for a in run._last.reversal.backward if isinstance(a, Record)]


def test_stretches_that_are_recorded_together_are_one_and_a_normalisation_whose_sums_are_kept_does_not_run_again() -> (
    None
):
    model, x = convolutions(24), torch.randn(2, 4, 16, 16)
    budget = int(0.5 * tape_of(model, x))
    buffers = [model]
    run = compare(model, list(model.parameters()), lambda: (x,), budget, calls=4, planner="auto", modules=buffers)
    assert run._last is not None
    assert run._last.reversal is not None
    back = [a for a in run._last.reversal.backward if isinstance(a, (Record, Backward))]
    assert all(isinstance(b, Backward) for a, b in pairwise(back) if isinstance(a, Record))
    assert run._last.holding.saves
    record_of = run(x)  # a live call, to see its record
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record = replays.record
    again = {k for a, b in _again(run) for k in range(a, b)}
    norms = {k for k in again if record.pattern(k).function.__name__ == "batch_norm"}
    held = norms.intersection(run._last.holding.saves)
    assert held
    del replays, record, record_of
    model.zero_grad()
    counts = backward_kernels(run, x, budget)
    assert counts["native_batch_norm_backward"] == 24
    assert counts["native_batch_norm"] == len(norms - held)


def test_what_has_to_run_where_it_has_made_something_that_is_there() -> None:
    norm = nn.LayerNorm(4)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)  # 0: saves what it is given, mean and deviation
        z = torch.sigmoid(y)  # 1: saves its result
        w = torch.softmax(z * 2.0, -1)  # 2, 3
        return functional.dropout(w, 0.5).sum()  # 4: draws; 5

    run = Program(program, budget="1GiB")
    loss = run(torch.ones(3, 4, requires_grad=True))
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record, needed = replays.record, Needed(replays.record)
    assert [record.given[k] for k in range(4)] == [record.packs[0] - 2, 0, record.packs[2], 0]
    assert list(needed.of(0, 2, ())) == [RUN, RUN]
    assert list(needed.of(0, 2, (), {1})) == [RUN, SKIP]
    assert list(needed.of(0, 1, (), {0})) == [SAVE]
    assert list(needed.of(0, 2, (), {0, 1})) == [SAVE, SKIP]
    assert list(needed.of(0, 2, (), {0})) == [RUN, RUN]  # its result is needed
    assert [needed.may_be_held(k) for k in range(6)] == [True, True, False, True, False, False]
    assert MIXED not in record.given
    loss.backward()


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_what_is_written_into_after_it_was_saved_is_refused_or_right(share: float) -> None:
    """As plain PyTorch does: a result that backward needs was modified."""
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = torch.sigmoid(x)
            x = y * 1.5
            y.add_(0.0)
        return x

    with pytest.raises(RuntimeError, match="inplace"):
        program(x).sum().backward()
    run = Program(program, budget=int(share * 24 * x.nbytes), planner="auto")
    for _ in range(4):
        y = run(x)
        with pytest.raises((RuntimeError, ValueError), match="inplace"):
            y.sum().backward()
        del y


def test_a_call_that_goes_another_way_is_exact_with_what_was_held() -> None:
    model = attention_blocks()
    ways = iter([0, 0, 0, 0, 1, 0, 1])

    def program(x: torch.Tensor, way: int) -> torch.Tensor:
        for k, block in enumerate(model):  # type: ignore[arg-type]
            x = block(x)
            if way and k == BLOCKS // 2:
                x = torch.tanh(x)
        return x

    x = torch.randn(2, TOKENS, WIDTH)
    budget = int(0.4 * tape_of(model, x))
    run = Program(program, budget=budget, planner="auto")
    for way in ways:
        results = []
        for function in (program, run):
            model.zero_grad()
            y = function(x, way)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *results))
