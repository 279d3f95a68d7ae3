"""Calls of which all that is saved has room run as they do without us, until one turns out otherwise."""

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from side_by_side import hear_noted, outcome, same
from test_program_random import OPERATIONS, made_of, with_fewer_writes
from torch import nn

from tapestream.costs import Budget
from tapestream.errors import BudgetError, GradientError
from tapestream.executor.program.noting.along import Along
from tapestream.frontends.program import program as programs
from tapestream.frontends.program.courses import Courses, Known
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.watch import Online
from tapestream.ir import Tier
from tapestream.storage.meter import track_memory

SIDE = 32
ROWS = 64


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of all calls that are noted, in order."""
    return hear_noted(monkeypatch)


Where = list[int | None]


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> Where:
    """At which operation calls turn out otherwise, and the bytes that there are from there on; None: as they do."""
    at: Where = [None, None]
    of, depart, after = Courses.of, Online.depart, programs.after_sweep

    def changed(self: Courses, key: Any, room: Budget) -> Known | None:
        known = of(self, key, room)
        if known is None or at[0] is None:
            return known
        calls = known.course.calls
        others = [one._replace(function=object()) for one in calls[at[0] : -1]]
        return replace(known, course=replace(known.course, calls=[*calls[: at[0]], *others, calls[-1]]))

    def departing(self: Online, held_nbytes: int) -> None:
        depart(self, self.budget - at[1] if at[1] else held_nbytes)

    def planned(found: Any, borders: Any, taped: Any, tape: Any, budget: int, planner: str) -> Any:
        return after(found, borders, taped, tape, at[1] or budget, "revolve" if at[1] else planner)

    monkeypatch.setattr(Courses, "of", changed)
    monkeypatch.setattr(Online, "depart", departing)
    monkeypatch.setattr(programs, "after_sweep", planned)
    return at


class Loop:
    """A recurrence of so many ``steps``, with a sum that is written into."""

    def __init__(self, steps: int = 20, noise: float = 0.0) -> None:
        self.weight = (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1)) / 6).requires_grad_()
        self.x, self.steps, self.noise = torch.ones(ROWS, SIDE), steps, noise

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        rows = torch.zeros(self.steps, SIDE)
        for step in range(self.steps):
            h = torch.tanh(h @ self.weight)
            if self.noise:
                h = nn.functional.dropout(h, self.noise)
            total += h.mean()
            rows[step] = h[0]
        return h.sum() + total + (rows * rows).sum()

    def agrees(self, program: Program) -> bool:
        """Whether a call is plain autograd's, bit for bit."""
        return agree(self, program, [self.weight], lambda: (self.x,))


def agree(plain: Any, program: Program, leaves: Sequence[torch.Tensor], make: Any, seed: int = 0) -> bool:
    """Whether a call is plain autograd's, bit for bit."""
    expected, found = outcome(plain, leaves, make, seed), outcome(program, leaves, make, seed)
    return all(map(same, found[0] + found[2], expected[0] + expected[2])) and torch.equal(found[3], expected[3])


def test_from_the_second_call_on_nothing_is_noted(noted: list[Any]) -> None:
    loop = Loop(noise=0.1)
    program = Program(loop, budget="16MiB")
    assert loop.agrees(program)
    first = len(noted)
    assert all(loop.agrees(program) for _ in range(3))
    assert 0 < first == len(noted)
    assert program.report is not None
    assert program.report.planned
    assert program.plan is not None


def test_calls_that_need_no_close_look_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, closely = Loop(), list[Any]()
    call = Along.call

    def counted(self: Along, function: Any, *given: Any) -> Any:
        closely.append(function)
        return call(self, function, *given)

    monkeypatch.setattr(Along, "call", counted)
    program = Program(loop, budget="16MiB")
    assert all(loop.agrees(program) for _ in range(3))
    closely.clear()
    assert loop.agrees(program)
    assert len(closely) <= 8


def test_what_others_put_in_place_of_seeding_between_calls_is_called_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, seeds = Loop(noise=0.1), list[int]()

    def function(h: torch.Tensor) -> torch.Tensor:
        torch.random.manual_seed(3)
        return loop(h)

    program, seed = Program(function, budget="16MiB"), torch.random.manual_seed
    assert all(agree(function, program, [loop.weight], lambda: (loop.x,)) for _ in range(2))

    def ours(number: int) -> torch.Generator:
        seeds.append(number)
        return seed(number)

    monkeypatch.setattr(torch.random, "manual_seed", ours)
    program(loop.x).backward()
    assert seeds == [3]
    assert torch.random.manual_seed is ours


def test_where_there_is_less_room_all_is_noted(noted: list[Any]) -> None:
    loop = Loop()
    program = Program(loop, budget="16MiB")
    assert loop.agrees(program)
    (known,) = program._courses._known.values()
    for less, along in ((0, True), (1, False)):
        program = Program(loop, budget=known.room_nbytes - less)
        assert loop.agrees(program)
        noted.clear()
        assert loop.agrees(program)
        assert along is not bool(noted)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("steps", [1, 2, 19, 21, 60])
def test_a_call_that_turns_out_otherwise(steps: int, noise: float, noted: list[Any]) -> None:
    loop = Loop(noise=noise)
    program = Program(loop, budget="16MiB")
    assert loop.agrees(program)
    noted.clear()
    loop.steps = steps
    assert loop.agrees(program)
    assert noted
    assert program.report is not None
    assert not program.report.planned
    loop.steps = 20
    assert all(loop.agrees(program) for _ in range(3))


def test_a_call_that_grows_stays_within_the_budget() -> None:
    loop = Loop()
    program = Program(loop, budget="16MiB")
    assert loop.agrees(program)
    (known,) = program._courses._known.values()
    budget = known.room_nbytes
    program = Program(loop, budget=budget)
    assert all(loop.agrees(program) for _ in range(2))
    loop.steps = 200
    with track_memory() as meter:
        program(loop.x).backward()
    assert meter.peak_nbytes <= 1.05 * budget
    assert program.report is not None
    assert program.report.reruns > 0
    assert loop.agrees(program)


def test_where_nothing_fits_beside_the_beginning_it_says_so_and_the_next_call_is_noted() -> None:
    weight, wide, more = torch.randn(64, 64, requires_grad=True), torch.randn(64, 256, requires_grad=True), False

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ weight)
        return (x @ wide).exp().sum() if more else x.sum()

    x = torch.randn(64, 64)
    program = Program(function, budget="16MiB")
    program(x).backward()
    (known,) = program._courses._known.values()
    budget = known.room_nbytes
    program = Program(function, budget=budget)
    for _ in range(2):
        program(x).backward()
    more = True
    with pytest.raises(BudgetError, match=r"began like the last one.*Call it again") as raised:
        program(x)
    assert raised.value.least_nbytes is not None
    assert raised.value.least_nbytes > budget
    gc.collect()
    assert program._live.nbytes[Tier.DEVICE] == 0
    assert agree(function, program, [weight, wide], lambda: (x,))


def test_calls_that_wait_for_backward_are_counted() -> None:
    loop = Loop()
    program = Program(loop, budget="16MiB")
    assert loop.agrees(program)
    y = program(loop.x)
    held = program._live.nbytes[Tier.DEVICE]
    assert held > 20 * ROWS * SIDE * 4
    z = program(loop.x)
    assert program._live.nbytes[Tier.DEVICE] == 2 * held
    z.backward()
    assert program._live.nbytes[Tier.DEVICE] == held
    y.backward()
    assert program._live.nbytes[Tier.DEVICE] == 0  # the results are still there, what was saved is not
    del y, z
    loop.steps = 30
    y = program(loop.x)
    assert program._live.nbytes[Tier.DEVICE] > held
    del y
    assert program._live.nbytes[Tier.DEVICE] == 0


def test_exceptions_inside_and_out() -> None:
    loop, fails = Loop(), False

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            x = x @ torch.ones(3, 3)
        except RuntimeError:
            x = x * 2
        y = loop(x)
        if fails:
            raise ValueError("no")
        return y

    program = Program(function, budget="16MiB")
    for fails in (False, False, True, False, False):
        if fails:
            with pytest.raises(ValueError, match="no"):
                program(loop.x)
            gc.collect()
            assert program._live.nbytes[Tier.DEVICE] == 0
            continue
        assert agree(function, program, [loop.weight], lambda: (loop.x,))


def test_users_hooks_on_saved_tensors_are_theirs_when_a_call_turns_out_otherwise() -> None:
    loop, seen = Loop(), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ loop.weight)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(loop.steps):
                h = torch.sin(h @ loop.weight)
        for _ in range(loop.steps):
            h = torch.cos(h @ loop.weight)
        return h.sum()

    program = Program(function, budget="16MiB")
    for steps in (5, 5, 9, 9, 2):
        loop.steps = steps
        seen.clear()
        expected = outcome(function, [loop.weight], lambda: (loop.x,))
        by_plain = seen[:]
        seen.clear()
        found = outcome(program, [loop.weight], lambda: (loop.x,))
        assert seen == by_plain
        assert all(map(same, found[0] + found[2], expected[0] + expected[2]))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_calls_that_ask_and_calls_of_others_are_told_apart(noted: list[Any]) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return 3 * gradients[0] * ctx.saved_tensors[0]

    loop, custom = Loop(), False

    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ loop.weight)
        if h.sum().item() > 1e9 or h.max() > 5 or not torch.is_tensor(h) or len(h) != ROWS or h.tolist() == []:
            return h.sum()
        h = Square.apply(h) if custom else h.contiguous()
        return torch.tanh(h @ loop.weight).sum()

    program = Program(function, budget="16MiB")
    for custom, along in (  # noqa: B007
        (False, False),
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ):
        expected = outcome(function, [loop.weight], lambda: (loop.x,))
        noted.clear()
        found = outcome(program, [loop.weight], lambda: (loop.x,))
        assert along is not bool(noted)
        assert all(map(same, found[0] + found[2], expected[0] + expected[2]))


@pytest.mark.parametrize("kind", ["one result", "several results", "a small result", "what no gradient flows to"])
def test_what_grows_without_another_call_is_noted(kind: str, noted: list[Any]) -> None:
    rows, lstm, weight = 8, nn.LSTM(4, 4), torch.randn(4, 4, requires_grad=True)
    functions: dict[str, Callable[[], torch.Tensor]] = {
        "one result": lambda: (torch.ones(8, 4).repeat(rows, 1) @ weight).sum(),
        "several results": lambda: lstm(captured)[0].sum(),
        "a small result": lambda: nn.functional.cross_entropy(captured, captured.argmax(1)),
        "what no gradient flows to": lambda: (captured > 0).float().mean() + weight.sum(),
    }
    function = functions[kind]
    program = Program(lambda x: function() * x, budget="16MiB")
    for rows, along in ((8, False), (8, True), (8, True), (16, False)):
        captured = torch.randn(rows, 4, requires_grad=kind == "a small result")
        leaves = [captured, weight, *lstm.parameters()]
        noted.clear()
        assert agree(lambda x: function() * x, program, leaves, lambda: (torch.ones(()),))
        assert along is not bool(noted), rows


@pytest.mark.full
def test_kinds_of_arguments_that_came_long_ago_are_forgotten() -> None:
    loop = Loop()
    program = Program(loop, budget="16MiB")
    for rows in range(1, 20):
        program(torch.ones(rows, SIDE)).backward()
    assert len(program._courses._known) == 16
    assert all(loop.agrees(program) for _ in range(2))


def test_written_into_after_the_call_backward_refuses() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, (y * y).sum()

    x = torch.ones(8, requires_grad=True)
    program = Program(function, budget="16MiB")
    for _ in range(3):
        y, loss = program(x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("cast", [nullcontext(), torch.autocast("cpu", torch.bfloat16)], ids=["float32", "autocast"])
def test_networks_with_buffers(cast: Any, noted: list[Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip
    x, found = torch.randn(4, 3, 8, 8), list[Any]()
    program = Program(net, budget="16MiB")
    start = [b.clone() for b in net.buffers()]
    for runs in (net, program):
        for b, old in zip(net.buffers(), start, strict=True):
            b.data.copy_(old)
        results = []
        for seed in range(4):
            with cast:
                results += [t for part in outcome(runs, list(net.parameters()), lambda: (x,), seed)[::2] for t in part]
            results += [b.clone() for b in net.buffers()]
            noted.clear()
        found.append(results)
    assert all(map(same, *found))


@pytest.mark.parametrize("nbytes", [None, 60_000])
def test_casts_from_before_a_call_turns_out_otherwise(nbytes: int | None, turning: Where) -> None:
    """Autocast remembers what it has cast of a weight. ``nbytes``: for what follows."""
    loop, bias = Loop(5), torch.zeros(SIDE, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(loop.steps):
                x = torch.tanh(nn.functional.linear(x, loop.weight, bias))
        return x.float().sum()

    program = Program(function, budget="16MiB")
    for _ in range(2):
        assert agree(function, program, [loop.weight, bias], lambda: (loop.x,))
    loop.steps, turning[:] = 35, [7, nbytes]
    assert agree(function, program, [loop.weight, bias], lambda: (loop.x,))
    assert program.report is not None
    assert (program.report.reruns > 0) is (nbytes is not None)


def test_what_shows_memory_without_versions_is_noted_always(noted: list[Any]) -> None:
    loop, shows = Loop(), [lambda t: t.data, lambda t: torch.from_numpy(t.detach().numpy().copy())]
    for show in shows:
        program = Program(lambda x, show=show: (loop(x) * show(x)).sum(), budget="16MiB")
        for _ in range(3):
            noted.clear()
            program(loop.x).backward()
            assert noted


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 1000), marks=pytest.mark.full)])
@pytest.mark.timeout(1800)
def test_random_programs_that_turn_out_otherwise_anywhere(seeds: range, turning: Where) -> None:
    """With views and writes across that place; all that is noted kept, and as little of it as works."""
    departed = reruns = refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        for steps in with_fewer_writes(rng.choices(range(len(OPERATIONS)), k=rng.randrange(3, 50))):
            function, make, leaves = made_of(steps, seed)
            try:
                outcome(function, leaves, make, seed)
                break
            except RuntimeError:  # writes that plain PyTorch refuses
                continue
        else:
            continue  # nothing needs a gradient
        program = Program(function, budget="64MiB", planner="store_all")

        turning[:] = None, None
        assert agree(function, program, leaves, make, seed)
        assert agree(function, program, leaves, make, seed)
        ((key, known),) = program._courses._known.items()
        n = len(known.course.calls) - 1
        for k in rng.sample(range(n + 1), 5):
            for nbytes in (None, 1):
                program._courses._known[key] = known
                turning[:] = k, nbytes
                try:
                    assert agree(function, program, leaves, make, seed)
                except BudgetError as error:
                    program._courses._known[key] = known
                    turning[1] = (error.least_nbytes or 0) - known.course.held_nbytes[k]
                    try:
                        assert agree(function, program, leaves, make, seed)
                    except GradientError as refusal:
                        assert "came to require a gradient afterwards" in str(refusal)  # noqa: PT017
                        refused += 1
                departed += 1
                assert program.report is not None
                reruns += program.report.reruns > 0
    assert departed >= 9 * len(seeds)
    assert reruns > len(seeds) // 3
    assert refused <= departed // 50
