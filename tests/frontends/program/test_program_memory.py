"""Bytes held, operations run again, and the size of the record."""

import gc
import sys
import weakref
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from side_by_side import least
from torch import nn

from tapestream.errors import BudgetError
from tapestream.executor.program.calls.patterns import Kinds, Measured, Patterns
from tapestream.executor.program.noting.trials import Trials
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.sizes import Sizes
from tapestream.ir import Tier
from tapestream.storage.meter import track_memory

FULL = pytest.mark.full
SIDE = 64
W = (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) / 8).requires_grad_()


def program(x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = torch.tanh(x @ W)
    return x


def peak(run: Program, steps: int) -> int:
    x = torch.ones(SIDE, SIDE)
    W.grad = torch.zeros_like(W)
    with track_memory() as meter:
        run(x, steps).sum().backward()
    W.grad = None
    return meter.peak_nbytes


@pytest.mark.thinned(9)
@pytest.mark.parametrize("planner", ["auto", "revolve"])
@pytest.mark.parametrize(("steps", "states"), [(50, 8), (50, 16), (50, 32), (150, 12), (150, 64)])
def test_the_peak_stays_within_the_budget(steps: int, states: int, planner: str) -> None:
    state = SIDE * SIDE * 4
    budget = states * state
    run = Program(program, budget=budget, planner=planner)
    peak(run, steps)
    for _ in range(2):
        found = peak(run, steps)
        assert found <= 1.05 * budget + 2 * state  # the argument and the sum of the gradients of W
    assert run.report is not None
    assert run.report.planned


def test_ten_times_longer_needs_no_more() -> None:
    budget = 32 * SIDE * SIDE * 4
    run = Program(program, budget=budget, planner="revolve")
    peaks = []
    for steps in (60, 600):
        peak(run, steps)
        peaks.append(peak(run, steps))
    assert peaks[1] <= peaks[0] + 2 * SIDE * SIDE * 4


def test_backward_runs_as_many_stretches_as_planned() -> None:
    run = Program(program, budget=24 * SIDE * SIDE * 4, planner="revolve")
    for planned in (False, True):
        y = run(torch.ones(SIDE, SIDE), 40).sum()
        assert run._replays is not None
        replays = run._replays()
        assert replays is not None
        y.backward()
        assert run.report is not None
        assert run.report.planned is planned
        assert replays.steps.stages == run.report.reruns
    W.grad = None


def test_the_record_takes_few_bytes_an_operation() -> None:
    run = Program(program, budget="64MiB", planner="revolve")
    y = run(torch.ones(2, SIDE), 2000)
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record = replays.record
    assert y.requires_grad
    patterns = sum(sys.getsizeof(p) for p in record.patterns.all)
    assert len(record) == 4000
    assert (record.host_nbytes() + patterns) / len(record) < 400


@pytest.mark.parametrize("share", [1.0, pytest.param(1.1, marks=FULL), 1.3, pytest.param(2.0, marks=FULL)])
def test_an_operation_that_could_not_be_tried_for_lack_of_room_stays_within_the_budget(share: float) -> None:
    """The backward of a square takes twice what the square is given, and here that is most of the budget."""
    wanted, x = torch.randn(200, 2), torch.randn(200, 2, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        path = [x]
        for _ in range(30):
            path.append((path[-1] * 1.01).sin())
        squares = (path[-1][:, None] - wanted).square().sum(2)
        return squares.min(0).values.mean() + squares.min(1).values.mean()

    with pytest.raises(BudgetError) as error:
        Program(program, budget=1)(x)
    assert error.value.least_nbytes is not None
    budget = int(share * error.value.least_nbytes)
    run = Program(program, budget=budget)
    for _ in range(3):
        torch.autograd.grad(run(x), x)
        with track_memory() as meter:
            torch.autograd.grad(run(x), x)
        assert meter.peak_nbytes <= 1.05 * budget + x.nbytes


@pytest.mark.full
def test_the_least_budget_does_not_mean_one_restart_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first states take most of the budget, wherever stretches are cut; of the others many fit."""
    monkeypatch.setattr(Sizes, "seconds", lambda sizes: numpy.full(len(sizes.record), 1e-3))

    def uneven(x: torch.Tensor) -> torch.Tensor:
        for k in range(120):
            x = torch.tanh(x @ W)
            if k % 6 == 5 and k < 30:
                x = x[: len(x) // 2]
        return x

    x = torch.ones(32 * SIDE, SIDE)
    budget = least(uneven, [W], lambda: (x,), 0)
    run = Program(uneven, budget=budget)
    for _ in range(3):
        run(x).sum().backward()
        assert run.report is not None
        assert run.report.reruns <= 4 * run.report.stages
    W.grad = None


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize("how", ["function", "module", "seed"])
def test_what_a_call_held_goes_with_its_graph_and_not_with_garbage(how: str) -> None:
    block, weight = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.randn(32, 32).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        for step in range(6):
            if how == "seed":
                torch.manual_seed(step)
            x = _Doubled.apply(x) if how == "function" else block(x) if how == "module" else x  # type: ignore[no-untyped-call]
            x = torch.tanh(x @ weight)
        return x

    run = Program(program, budget="1MiB", opaque=[nn.Sequential] if how == "module" else [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y = run(torch.ones(8, 32))
            assert run._live.nbytes[Tier.DEVICE] > 0
            del y
            assert run._live.nbytes[Tier.DEVICE] == 0
    finally:
        gc.enable()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("factor", [1.0, pytest.param(1.1, marks=FULL), 1.2, pytest.param(1.5, marks=FULL)])
def test_what_an_operation_has_saved_goes_when_its_own_nodes_have_asked_for_it(factor: float) -> None:
    """Not when an earlier one asks that has saved something, too: between the two, gradients are joined."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 384)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (4, 32)).transpose(1, 2)

    def attention(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            q, k, v = map(heads, linear(x).chunk(3, -1))
            x = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x

    for p in linear.parameters():
        p.grad = torch.zeros_like(p)
    _check_peak(attention, torch.randn(32, 64, 128), factor)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("factor", [1, pytest.param(1.1, marks=FULL), 1.3])
@pytest.mark.parametrize("weights", [False, True])
def test_self_attention_is_tried_as_such(weights: bool, factor: float) -> None:
    """Where query, key and value are one tensor, they are projected at once; backward of that takes more."""
    attentions = nn.ModuleList(nn.MultiheadAttention(128, 4, batch_first=True) for _ in range(4))

    def function(x: torch.Tensor) -> torch.Tensor:
        for attention in attentions:
            x = x + attention(x, x, x, need_weights=weights)[0]
        return x

    _check_peak(function, _with_gradients(attentions, torch.randn(8, 64, 128)), factor)


def test_what_is_measured_with_one_tensor_given_thrice_says_nothing_of_three() -> None:
    patterns, (x, y, z) = Patterns(Kinds()), torch.randn(3, 4)
    calls = [patterns.of(torch.addcmul, given, {}, []) for given in ((x, x, x), (x, y, z), (y, y, y), (y, z, z))]
    assert calls[0] is calls[2]
    assert len({id(call.measured) for call in calls}) == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("factor", [1, pytest.param(1.1, marks=FULL), 1.3])
def test_transformer_encoder_layers_near_the_least(factor: float) -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0) for _ in range(4))

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    _check_peak(function, _with_gradients(layers, torch.randn(8, 64, 128)), factor)


@pytest.mark.full
def test_what_is_saved_again_after_the_tape_began_anew_counts_again() -> None:
    """Without a plan: softmax saves its result, and the loss, which is on the tape where softmax is not, saves it."""

    def function(x: torch.Tensor) -> Any:
        total: Any = 0
        for _ in range(4):
            x = x.tanh()
            total = total + nn.functional.smooth_l1_loss(x, x.roll(1, 0))
            total = total + nn.functional.kl_div(x.log_softmax(1), x.roll(2, 0).softmax(1), reduction="batchmean")
            total = total + nn.functional.mse_loss(x, x * 2)
        return total

    _check_peak(function, _with_gradients(nn.ModuleList(), torch.randn(128, 256)), 1)


def _with_gradients(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``x``; gradients are there already, so that those of a call are added to them."""
    for p in (*module.parameters(), x.requires_grad_()):
        p.grad = torch.zeros_like(p)
    return x


def _check_peak(function: Any, x: torch.Tensor, factor: float) -> None:
    """With ``factor`` times the least budget that works, calls stay within it."""
    budget = int(factor * _enough(function, x))
    run = Program(function, budget=budget)
    run(x).sum().backward()  # type: ignore[no-untyped-call]
    for _ in range(4):
        with track_memory() as meter:
            y = run(x)
            y.backward(torch.ones(()).expand_as(y))
        assert meter.peak_nbytes - y.nbytes <= 1.05 * budget


def _enough(function: Any, x: torch.Tensor) -> int:
    """The least budget in bytes with which several calls work: a later one knows more of what operations take."""
    enough, calls = 1000, 0
    run = Program(function, budget=enough)
    while calls < 4:
        try:
            run(x).sum().backward()  # type: ignore[no-untyped-call]
            calls += 1
        except BudgetError as error:
            enough, calls = error.least_nbytes or 2 * enough, 0
            run = Program(function, budget=enough)
    return enough


@pytest.mark.parametrize("function", [torch.tanh, torch.exp, torch.softmax, torch.logsumexp, torch.relu])
def test_nothing_stays_of_what_is_tried(function: Any) -> None:
    """Results that are saved for backward had held themselves, one for each new shape."""
    made = []

    class Spy(NamedTuple):
        generators = ()

        def call(self, tensors: Any) -> torch.Tensor:
            y = function(*tensors) if function in (torch.tanh, torch.exp, torch.relu) else function(*tensors, 1)
            made.append(weakref.ref(y))
            result: torch.Tensor = y
            return result

    trials, measured = Trials(torch.device("cpu")), Measured()
    trials.reverse(measured, Spy(), [torch.randn(30, 40)], [True], set())  # type: ignore[arg-type]
    assert measured.reverse_nbytes is not None
    assert [ref() for ref in made] == [None]


@pytest.mark.parametrize("share", [1.0, 1.4])
@pytest.mark.parametrize("way", ["setitem", "copy_", "narrow", "add_"])
def test_results_written_one_by_one_into_what_was_made_before(way: str, share: float) -> None:
    """What is written into comes to require a gradient, and has one as large as itself."""

    def solve(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(10, SIDE, SIDE)
        for k in range(10):
            x = torch.tanh(torch.tanh(x @ W) @ W)
            if way == "setitem":
                out[k] = x
            elif way == "narrow":
                out.narrow(0, k, 1).squeeze(0).copy_(x)
            else:
                getattr(out[k], way)(x)
        return out.square().mean()

    x = torch.ones(SIDE, SIDE)

    budget = int(share * least(solve, [W], lambda: (x,), 0))
    run = Program(solve, budget=budget)
    run(x).backward()
    for _ in range(2):
        W.grad = torch.zeros_like(W)
        with track_memory() as meter:
            run(x).backward()
        W.grad = None
        assert meter.peak_nbytes <= 1.02 * budget + SIDE * SIDE * 4 + 16_384  # the sum of the gradients of W
