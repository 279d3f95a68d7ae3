"""Calls that follow the last one: noted as closely looked at, and right where a call does something else."""

import contextlib
import copy
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from side_by_side import hear_followed, outcome, same
from thinned import one_in
from torch import nn
from torch.nn import functional

from tapestream.errors import BudgetError, GradientError
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.last import BY_OPERATION
from tapestream.executor.program.record.record import Record
from tapestream.frontends.program import program as frontend
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.results import found_in

SIDE = 4
OTHERS = ("calls", "arguments", "results", "saves", "birth", "last_use", "death", "cotangent_nbytes", "storage",
          "storage_nbytes", "storage_external", "drawn", "untried")  # fmt: skip
LEARNED = {"reverse_nbytes", "transient_nbytes", "taken_nbytes", "untried", "shape"}
"""Of these, more is known in later calls."""


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions of which calls have been followed."""
    return hear_followed(monkeypatch)


@contextlib.contextmanager
def records() -> Iterator[list[Record]]:
    """The records of programs that run inside."""
    found: list[Record] = []
    sweep = frontend.sweep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "sweep", lambda *given: found.append(given[1]) or sweep(*given))
        yield found


def told(record: Record) -> dict[str, Any]:
    """All that a record holds, but for times and tensors."""
    arrays = {name: list(getattr(record, name)) for name in (*BY_OPERATION, *OTHERS) if name != "seconds"}
    outside = [(e.storage, e.leaf, e.requires, e.takes, e.first_use, e.last_use, e.looks) for e in record.externals]
    patterns = [one.key for one in record.patterns.all]
    writes = {storage: list(operations) for storage, operations in record.writes.items()}
    return {**arrays, "outside": outside, "patterns": patterns, "writes": writes, "shape": record.shape()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    layers = (nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Dropout(0.0), nn.Conv2d(4, 4, 3), norm, nn.GELU(), nn.Flatten(),
              nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))  # fmt: skip
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def attention() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 5, 8)


@pytest.mark.parametrize("factor", [2, 1000])
@pytest.mark.parametrize("make", [net, attention])
def test_a_record_is_that_of_a_call_that_was_looked_at(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
    factor: int,
    followed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x = make()
    with records() as found:
        runs = Program(module, budget=factor * least_of(module, (x,)), planner="revolve")
        for call in range(5):
            if call == 4:
                monkeypatch.setattr(Recorder, "follow", lambda *_: None)
            torch.manual_seed(call)
            runs(x).sum().backward()
            assert call == 0 or (runs.report is not None and runs.report.planned)
    assert len(followed) > len(found[-1]) // 2
    assert told(found[2]) == told(found[3]) == told(found[4])


def least_of(function: Callable[..., Any], given: tuple[Any, ...]) -> int:
    """The least budget, in bytes."""
    try:
        found_in(Program(function, budget=1, planner="revolve")(*given))
    except BudgetError as error:
        return error.least_nbytes or 1
    return 1


# -- calls that differ ---------------------------------------------------------------------------------------------

W = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1)).requires_grad_()
V = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(2)).requires_grad_()
C = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(3))
SHAPE = [0, 0]
Variant = Callable[[torch.Tensor, bool], torch.Tensor]


def another_branch(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    h = h.sin() if odd else h.cos()
    return h * h @ W


def another_constant(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W) * (3.0 if odd else 2.0)
    return functional.softmax(h, 0 if odd else 1) @ W


def another_zero(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W) * (-0.0 if odd else 0.0)
    return 1.0 / (h + 1e-3) + torch.copysign(torch.ones_like(h), h)


def another_weight(x: torch.Tensor, odd: bool) -> torch.Tensor:
    first, second = (V, W) if odd else (W, V)
    return torch.tanh(torch.tanh(x @ first) @ second) * first


def one_weight_twice(x: torch.Tensor, odd: bool) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ W) @ (W if odd else V))


def an_argument_for_a_value(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(C * 2.0)
    return torch.tanh(x @ W) + torch.exp(h * (C if odd else h))


def values_in_another_order(x: torch.Tensor, odd: bool) -> torch.Tensor:
    a, b = torch.tanh(x @ W), torch.sigmoid(x @ V)
    return a @ b if not odd else b @ a


def other_strides(x: torch.Tensor, odd: bool) -> torch.Tensor:
    c = C.t().contiguous().t() if odd else C
    outside.append(c)
    h = torch.tanh(x @ W) * c
    return h.contiguous() @ V


outside: list[torch.Tensor] = []


def as_many_as_there_are(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    mask = (0.5 if odd else -0.5) < C
    return (h[mask] * 2.0).exp().sum() + h * 3.0


def a_write_into_a_value(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W) * 1.0
    g = h + 1.0
    if odd:
        g.mul_(2.0)
    return g @ V


def a_write_instead_of_a_new_value(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W) * 1.0
    g = h.add_(1.0) if odd else h.add(1.0)
    return g @ V + g


def without_gradients(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    with torch.set_grad_enabled(not odd):
        g = torch.sigmoid(h @ V)
    return h * g


def in_half_precision(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
        g = functional.linear(h, V)
    return h * g.float()


def a_detached_value(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    g = h.detach() if odd else h.clone()
    return torch.sigmoid(g @ V) * h


def a_view_or_a_copy(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W) * 1.0
    g = h.view_as(h) if odd else h.clone()
    k = g * 2.0
    h.mul_(3.0)
    return k @ V + h


def a_failure_that_is_caught(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    try:
        g = h @ (torch.ones(SIDE + 1, SIDE) if odd else torch.ones(SIDE, SIDE))
    except RuntimeError:
        g = h @ V
    return torch.tanh(g) * h


def a_function_of_ones_own(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    return torch.sigmoid(Twice.apply(h) if odd else h * 2.0) @ V


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


def dropping_more(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = functional.dropout(torch.tanh(x @ W), 0.4 if odd else 0.0)
    return torch.sigmoid(h @ V)


def gives_up_early(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    for _ in range(2 if odd else 5):
        h = torch.tanh(h @ V)
    return h


def goes_on(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    for _ in range(7 if odd else 3):
        h = torch.tanh(h @ V)
    return h


def other_hooks(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with hooks if odd else contextlib.nullcontext():
        g = torch.sigmoid(h @ V)
    return g @ h


def another_list(x: torch.Tensor, odd: bool) -> torch.Tensor:
    SHAPE[:] = [2, 8] if odd else [8, 2]
    return (torch.tanh(x @ W).reshape(SHAPE) * 1.5).reshape(SIDE, SIDE) @ V


class Halved(torch.Tensor):
    """Gives half of every product, plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.matmul:
            return args[0].matmul(C) * 0.5
        return super().__torch_function__(func, types, args, kwargs or {})


HALVED = C.as_subclass(Halved)


def a_class_of_ones_own(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    return h.matmul(HALVED if odd else C) * h


def a_copy_by_numpy(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W)
    scale = float(h.detach().numpy().sum()) if odd else 0.5
    return torch.sigmoid(h * scale) @ V


def fewer_parts(x: torch.Tensor, odd: bool) -> torch.Tensor:
    parts = torch.tanh(x @ W).chunk(2 if odd else 4)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)]) @ V


def another_dtype(x: torch.Tensor, odd: bool) -> torch.Tensor:
    h = torch.tanh(x @ W).to(torch.float64 if odd else torch.float32)
    return (h * 1.5).float() @ V


VARIANTS: tuple[Variant, ...] = (
    another_branch, another_constant, another_zero, another_weight, one_weight_twice, an_argument_for_a_value,
    values_in_another_order, other_strides, as_many_as_there_are, a_write_into_a_value, a_write_instead_of_a_new_value,
    without_gradients, in_half_precision, a_detached_value, a_view_or_a_copy, a_failure_that_is_caught,
    a_function_of_ones_own, dropping_more, gives_up_early, goes_on, other_hooks, a_copy_by_numpy, fewer_parts,
    another_dtype, another_list, a_class_of_ones_own,
)  # fmt: skip


@pytest.mark.thinned(12)
@pytest.mark.parametrize("factor", [1, 3, 1000])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.__name__)
def test_a_call_that_does_something_else_is_that_of_plain_pytorch(
    variant: Variant, factor: int, followed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, x = [False], torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(variant(torch.tanh(x @ W), odd[0]) @ V) * 2.0

    def make() -> tuple[torch.Tensor]:
        return (x * 1.0,)

    least = 1
    for odd[0] in (False, True):
        least = max(least, least_of(function, make()))
    with records() as found:
        runs = Program(function, budget=factor * least + 1024, planner="revolve")
        for call, odd[0] in enumerate((False, False, False, False, True, False, False, True, True, True, False)):
            expected, got = outcome(function, [W, V, x], make, call), outcome(runs, [W, V, x], make, call)
            assert all(map(same, got[0], expected[0]))
            assert all(map(same, got[2], expected[2]))
            assert torch.equal(got[3], expected[3])
            if call == 3:
                assert followed
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "follow", lambda *_: None)
            for odd[0] in (False, True):
                outcome(runs, [W, V, x], make)
    notes = [told(record) for record in found]
    for number, note in enumerate(notes):
        unlike = min((differing(note, one) for one in notes[-2:]), key=len)
        assert unlike.keys() <= LEARNED, number


# -- what calls are given, and buffers ------------------------------------------------------------------------------


def test_weights_that_are_frozen_replaced_or_tied_later(followed: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    first, last = model[0], model[4]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    runs, x = Program(model, budget="1MiB", planner="revolve"), torch.randn(3, 4)

    def freeze() -> None:
        first.weight.requires_grad_(False)

    def thaw() -> None:
        first.weight.requires_grad_(True)

    def replace() -> None:
        last.weight = nn.Parameter(torch.randn(4, 4).t())

    def tie() -> None:
        last.weight = first.weight

    def over_one_memory() -> None:
        last.weight = nn.Parameter(first.weight.detach().view(4, 4))

    for change in (None, None, None, freeze, None, thaw, None, replace, None, tie, None, None, over_one_memory, None):
        if change is not None:
            change()
        leaves = list(model.parameters())
        expected, got = outcome(model, leaves, lambda: (x,)), outcome(runs, leaves, lambda: (x,))
        assert all(map(same, got[0], expected[0]))
        assert all(map(same, got[2], expected[2]))
    assert followed


def test_buffers_are_written_once_also_where_modes_and_momentum_change(followed: list[str]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.load_state_dict(plain.state_dict())
    runs, x = Program(model, budget="1MiB", planner="revolve"), torch.randn(3, 4)
    for call in range(12):
        for one in (plain, model):
            one.train(call not in (5, 6, 10))
            one[1].momentum = 0.3 if call == 8 else 0.1
        expected = outcome(plain, [*plain.parameters()], lambda: (x,))
        got = outcome(runs, [*model.parameters()], lambda: (x,))
        assert all(map(same, got[0], expected[0]))
        assert all(map(same, got[2], expected[2]))
        assert all(map(same, model.buffers(), plain.buffers()))
    assert {"batch_norm", "add_", "linear"} <= set(followed)


def test_statistics_over_memory_of_numpy_are_written_once(followed: list[str]) -> None:
    """Into which torch writes without a version: it is the program itself that does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    means = [numpy.zeros(4, numpy.float32) for _ in range(2)]
    for one, mean in zip((model, plain), means, strict=True):
        one[1].running_mean = torch.from_numpy(mean)
    x = torch.randn(3, 4)
    runs = Program(model, budget=2 * least_of(copy.deepcopy(model), (x,)), planner="revolve")
    for _ in range(6):
        expected = outcome(plain, [*plain.parameters()], lambda: (x,))
        got = outcome(runs, [*model.parameters()], lambda: (x,))
        assert all(map(same, got[2], expected[2]))
        assert (means[0] == means[1]).all()
    assert "batch_norm" in followed


def test_arguments_that_share_memory_in_a_later_call_alone(followed: list[str]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ W) * torch.tanh(y @ V)

    runs, base = Program(function, budget="1MiB", planner="revolve"), torch.randn(2, SIDE, SIDE)
    for call in range(9):
        given = (base[0], base[1]) if call in (4, 7) else (base[0].clone(), base[1].clone())
        if call == 8:
            given = (given[0], given[0])
        expected, got = (outcome(one, [W, V], lambda g=given: g) for one in (function, runs))
        assert all(map(same, got[0], expected[0]))
        assert all(map(same, got[2], expected[2]))
    assert followed


def test_memory_that_numpy_writes_into_in_a_later_call_is_seen() -> None:
    late = [False]

    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ W)
        c = C * 2.0
        if late[0]:
            c.numpy()[:] = 5.0
        return torch.exp(h * c).sum() + torch.sin(h @ V).sum()

    runs, x = Program(function, budget=900, planner="revolve"), torch.randn(SIDE, SIDE)
    for late[0] in (False, False, False, False, True):
        expected = outcome(function, [W, V], lambda: (x,))
        try:
            got = outcome(runs, [W, V], lambda: (x,))
        except GradientError:
            assert late[0]
        else:
            assert all(map(same, got[2], expected[2]))


def elsewhere(do: Callable[[], Any]) -> None:
    """In another thread, of which no call is seen."""
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def well_known(function: Callable[..., Any], x: torch.Tensor) -> Program:
    """In the least memory, and called so often that the next call follows the last."""
    runs = Program(function, budget=least_of(function, (x,)), planner="revolve")
    for _ in range(4):
        runs(x).sum().backward()
    return runs


def test_a_write_that_no_call_shows_is_seen_in_a_followed_call_too(followed: list[str]) -> None:
    """Into a value that was noted with others, later."""
    late = [False]

    def function(x: torch.Tensor) -> torch.Tensor:
        h = C * 2.0
        if late[0]:
            elsewhere(lambda: h.mul_(3.0))
        for _ in range(6):
            x = torch.tanh((x @ W) * h)
        return x

    x = torch.randn(SIDE, SIDE)
    runs = well_known(function, x)
    assert followed
    late[0] = True
    with pytest.raises(GradientError, match="without a torch call"):
        runs(x).sum().backward()


@pytest.mark.parametrize("at_first_use", [True, False])
def test_memory_that_another_thread_replaces_meanwhile_is_that_of_plain_pytorch_or_refused(
    at_first_use: bool, followed: list[str]
) -> None:
    weight, late = nn.Parameter(W.detach().clone()), [False]
    other = torch.randn(SIDE, SIDE)

    def replaced() -> None:
        elsewhere(lambda: setattr(weight, "data", other))

    def function(x: torch.Tensor) -> torch.Tensor:
        if late[0] and at_first_use:
            replaced()
        for step in range(6):
            x = torch.tanh(x @ weight) if step == 0 else torch.tanh(x @ V)
            if late[0] and not at_first_use and step == 0:
                replaced()
        return x

    x = torch.randn(SIDE, SIDE)
    runs = well_known(function, x)
    assert followed
    late[0] = True
    weight.data = W.detach().clone()
    expected = outcome(function, [weight, V], lambda: (x,))
    weight.data = W.detach().clone()
    if at_first_use:
        assert all(map(same, outcome(runs, [weight, V], lambda: (x,))[2], expected[2]))
    else:
        with pytest.raises(GradientError, match="replaced"):
            outcome(runs, [weight, V], lambda: (x,))


def test_another_value_that_is_written_into_ends_following() -> None:
    """It makes others require a gradient, a buffer too, which is refused."""
    late = [False]

    def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y, a, b = torch.tanh(x @ W), C * 2.0, C * 3.0
        (a if late[0] else b)[0] = y[0]
        total.add_(a)
        return torch.tanh(y * total).sum() + b.sum()

    runs, x = Program(function, budget=1 << 20, planner="revolve"), torch.randn(SIDE, SIDE)
    for _ in range(4):
        runs(x, torch.zeros(SIDE, SIDE)).backward()
    late[0] = True
    with pytest.raises(GradientError, match="was switched inside"):
        runs(x, torch.zeros(SIDE, SIDE))


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    ("calls", "at"), one_in(2, itertools.product([(5,), (6,), (0, 1, 2, 3, 4), (3, 4, 5, 6, 7)], [0, 1, 4, 5]))
)
@pytest.mark.parametrize("which", ["unused", "used", "used_later", "another_shape", "written_later", "fails"])
def test_tensors_that_are_looked_at_in_some_calls_alone(
    which: str, at: int, calls: tuple[int, ...], followed: list[str]
) -> None:
    """By calls that make nothing: what they show is known from then on, though no operation was given it."""
    torch.manual_seed(0)
    weights = [torch.randn(SIDE, SIDE).requires_grad_() for _ in range(5)]
    total, unused, looks = torch.zeros(SIDE, SIDE), torch.randn(SIDE, SIDE).requires_grad_(), [False]
    one = {"unused": unused, "used": weights[0], "used_later": weights[-1], "another_shape": torch.ones(3),
           "written_later": total, "fails": unused}[which]  # fmt: skip

    def look() -> None:
        if looks[0] and which == "fails":
            with contextlib.suppress(IndexError):
                functional.cross_entropy(one, torch.full((SIDE,), SIDE))
        elif looks[0]:
            one.detach().sum().item() if which == "used" else one.tolist()

    def function(x: torch.Tensor) -> torch.Tensor:
        for i, weight in enumerate(weights):
            if i == at:
                look()
            x = torch.tanh(x @ weight)
        if at == len(weights):
            look()
        total.add_(1.0)
        return (x * total).sum()

    x, leaves = torch.randn(SIDE, SIDE), [*weights, unused]
    runs = Program(function, budget=least_of(function, (x,)) + 256, planner="revolve")
    for call in range(9):
        looks[0] = call in calls
        total.fill_(2.0)
        expected = outcome(function, leaves, lambda: (x,))
        left = total.clone()
        total.fill_(2.0)
        got = outcome(runs, leaves, lambda: (x,))
        assert all(map(same, got[0], expected[0]))
        assert all(map(same, got[2], expected[2]))
        assert same(total, left)
    assert followed


def test_parameters_may_be_swapped_between_calls() -> None:
    """PyTorch refuses that for tensors that somebody refers to weakly."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    runs = Program(model, budget="1MiB", planner="revolve")
    for _ in range(4):
        runs(x).sum().backward()
        model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for _ in range(3):
        expected, got = (outcome(one, [*model.parameters()], lambda: (x.double(),)) for one in (model, runs))
        assert all(map(same, got[2], expected[2]))


def test_a_model_that_is_replaced_by_another_is_not_held(followed: list[str]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))

    held, x = {"model": model()}, torch.randn(2, 2, 6, 6)
    runs = Program(lambda x: torch.tanh(held["model"](x)), budget="1MiB", planner="revolve")
    for _ in range(3):
        first = weakref.ref(held["model"])
        for _ in range(5):
            with_buffers = [*held["model"].parameters(), *held["model"].buffers()]
            before = [t.detach().clone() for t in with_buffers]
            expected = outcome(lambda x: torch.tanh(held["model"](x)), [*held["model"].parameters()], lambda: (x,))
            after = [t.detach().clone() for t in with_buffers]
            followed.clear()
            with torch.no_grad():
                for tensor, was in zip(with_buffers, before, strict=True):
                    tensor.copy_(was)
            ours = outcome(runs, [*held["model"].parameters()], lambda: (x,))
            assert all(map(same, ours[2], expected[2]))
            assert all(map(torch.equal, with_buffers, after))
            del expected, ours, with_buffers, tensor
        assert "conv2d" in followed
        held["model"] = model()
        gc.collect()
        assert first() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_that_are_there_and_not_called_do_not_matter(followed: list[str]) -> None:
    scripted, model, x = torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4), torch.randn(2, 4)
    runs = Program(
        lambda x, other=False: scripted(x) if other else torch.tanh(model(x)), budget="1MiB", planner="revolve"
    )
    for _ in range(5):
        runs(x).sum().backward()
    assert followed


def test_a_last_call_holds_no_tensors_and_goes_with_the_program(followed: list[str]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    runs = Program(lambda x: model(torch.tanh(model(x))), budget="1MiB", planner="revolve")
    for _ in range(4):
        given = x.clone()
        runs(given).sum().backward()
    seen = weakref.ref(given)
    del given
    assert followed
    assert seen() is None


# -- random ones ----------------------------------------------------------------------------------------------------

Step = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor | None]
STEPS: tuple[Step, ...] = (
    lambda pool, a, b: a + b,
    lambda pool, a, b: torch.tanh(a @ b),
    lambda pool, a, b: a * b * 0.5,
    lambda pool, a, b: a.t(),
    lambda pool, a, b: a.view_as(a),
    lambda pool, a, b: a.mul_(0.7),
    lambda pool, a, b: torch.relu(a),
    lambda pool, a, b: torch.relu_(a),
    lambda pool, a, b: a.detach(),
    lambda pool, a, b: a.clone(),
    lambda pool, a, b: functional.dropout(a, 0.3),
    lambda pool, a, b: functional.layer_norm(a, (SIDE,)),
    lambda pool, a, b: functional.linear(a, W, b[0]),
    lambda pool, a, b: torch.cat([b[:2], a[2:]]),
    lambda pool, a, b: a.reshape(-1).view(SIDE, SIDE),
    lambda pool, a, b: pool.pop(0) if len(pool) > 3 else None,
    lambda pool, a, b: a.contiguous() * 1.0,
    lambda pool, a, b: functional.softmax(a, -1),
)  # fmt: skip
some = st.lists(st.integers(0, len(STEPS) - 1), min_size=4, max_size=16)
changes = st.lists(st.tuples(st.integers(0, 15), st.integers(0, len(STEPS) - 1)), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(some, changes, st.integers(0, 1000))
def test_random_programs_that_change_now_and_then(steps: list[int], changed: list[tuple[int, int]], seed: int) -> None:
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    now = list(steps)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        rng = random.Random(seed)
        pool = [x * 1.0, torch.tanh(x @ W), x + V]
        for step in now:
            made = STEPS[step](pool, rng.choice(pool), rng.choice(pool))
            if made is not None:
                pool = [*pool, made][-5:]
        return [sum((t.sum() for t in pool), torch.zeros(())), pool[-1] * 1.0]

    def make() -> tuple[torch.Tensor]:
        return (x * 1.0,)

    def least(steps: list[int]) -> int:
        now[:] = steps
        return least_of(function, make())

    variants = [steps]
    for place, step in changed:
        variants.append([*variants[-1][: place % len(steps)], step, *variants[-1][place % len(steps) + 1 :]])
    try:
        for now[:] in variants:
            outcome(function, [W, V, x], make, seed)
    except RuntimeError:  # a write that plain PyTorch refuses
        return
    most = max(map(least, variants))
    for factor in (2, 100):
        runs = Program(function, budget=factor * most + 4096, planner="revolve")
        for now[:] in (steps, steps, steps, *variants, steps, steps, steps, variants[-1]):
            expected, got = outcome(function, [W, V, x], make, seed), outcome(runs, [W, V, x], make, seed)
            assert all(map(same, got[0], expected[0]))
            assert all(map(same, got[2], expected[2]))
            assert torch.equal(got[3], expected[3])


def test_numbers_of_numpy_are_compared_by_what_they_are() -> None:
    scale: list[Any] = [numpy.float64(2.0)]

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ W) * scale[0]) @ V

    runs, x = Program(function, budget="1MiB", planner="revolve"), torch.randn(SIDE, SIDE)
    for scale[0] in (numpy.float64(2.0), numpy.float64(2.0), numpy.float64(2.0), numpy.float64(3.0), 3.0, 3, True):
        expected, got = outcome(function, [W, V], lambda: (x,)), outcome(runs, [W, V], lambda: (x,))
        assert all(map(same, got[2], expected[2]))
