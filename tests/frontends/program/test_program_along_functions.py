"""Calls of autograd.Functions, which may do anything, on the fast path: plain, until one keeps something else."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import hear_noted, outcome, same

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.executor.program.noting.along import Along
from tapestream.frontends.program.program import Program
from tapestream.ir import Tier

SIDE, ROWS, STEPS = 16, 8, 6


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of all calls that are noted, in order."""
    return hear_noted(monkeypatch)


class Spike(torch.autograd.Function):
    """A step with a gradient. What it ``keeps`` beside its input is for the tests to say."""

    keeps = "nothing"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float, shown: Any = None) -> torch.Tensor:
        more = [x.repeat(64, 1)] if Spike.keeps == "more saved" else []
        ctx.save_for_backward(x, *more)
        ctx.slope = slope
        if Spike.keeps == "on the context":
            ctx.more = x.repeat(64, 1)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        return gradients[0] / (1 + (ctx.slope * x).abs()) ** 2, None, None


class Squares(torch.autograd.Function):
    """Writes into its argument, and gives that, another and a number of each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(y)
        x.mul_(2)
        found = (y * y).argmax(1)
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(found)
        return x, y * y, found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return 2 * gradients[0], 2 * ctx.saved_tensors[0] * gradients[1]


@torch.library.custom_op("tapestream_tests_along::spike", mutates_args=())
def spike(x: torch.Tensor, slope: float) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def _setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], *([inputs[0].repeat(64, 1)] if Spike.keeps == "more saved" else []))
    ctx.slope = inputs[1]
    if Spike.keeps == "on the context":
        ctx.more = inputs[0].repeat(64, 1)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return gradient / (1 + (ctx.slope * ctx.saved_tensors[0]).abs()) ** 2, None


spike.register_autograd(_backward, setup_context=_setup)


class Net:
    """A recurrence with a `Spike` in each step."""

    def __init__(self, function: Callable[..., Any] = Spike.apply, *constants: Any) -> None:
        made = torch.Generator().manual_seed(1)
        self.weight = (torch.randn(SIDE, SIDE, generator=made) / 3).requires_grad_()
        self.x, self.function, self.constants = torch.randn(ROWS, SIDE, generator=made), function, constants or (2.0,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS):
            x = x + self.function(x @ self.weight, *self.constants)
        return (x * x).sum()

    def agrees(self, program: Program) -> bool:
        """Whether a call is plain autograd's, bit for bit."""
        expected, found = (outcome(one, [self.weight], lambda: (self.x,)) for one in (self, program))
        return all(map(same, found[0] + found[2], expected[0] + expected[2]))


def squares(x: torch.Tensor, _: float) -> torch.Tensor:
    written, squared, found = Squares.apply(x.clone(), x)  # type: ignore[no-untyped-call]
    return written + squared * found.sum()  # type: ignore[no-any-return]


def both(x: torch.Tensor, slope: float) -> torch.Tensor:
    with torch.no_grad():
        still = Spike.apply(x, slope)  # type: ignore[no-untyped-call]
    return still * Spike.apply(x, slope)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("function", "constants"),
    [
        (Spike.apply, (2.0,)),
        (Spike.apply, (2.0, (slice(None), 1, "a"))),
        (squares, (2.0,)),
        (both, (2.0,)),
        (spike, (2.0,)),
    ],
    ids=["a step", "given a tuple", "writes, gives three", "without gradients, too", "a custom operation"],
)
def test_from_the_second_call_on_nothing_is_noted(function: Any, constants: Any, noted: list[Any]) -> None:
    net = Net(function, *constants)
    program = Program(net, budget="16MiB")
    assert net.agrees(program)
    first = len(noted)
    assert first > 0
    assert all(net.agrees(program) for _ in range(3))
    assert len(noted) == first


@pytest.mark.parametrize("after", [(3.0,), (2,), (2.0, "a"), (2.0, [1])], ids=str)
def test_another_constant_is_noted(after: tuple[Any, ...], noted: list[Any]) -> None:
    net = Net()
    program = Program(net, budget="16MiB")
    along = []
    for constants in (*[(2.0,)] * 2, *[after] * 4):
        net.constants = constants
        noted.clear()
        assert net.agrees(program)
        along.append(not noted)
    assert along[:3] == [False, True, False]
    assert along[-1]


@pytest.mark.parametrize("function", [Spike.apply, spike], ids=["a Function", "a custom operation"])
@pytest.mark.parametrize("keeps", ["more saved", "on the context"])
def test_what_keeps_more_than_last_time_is_noted_and_counted(
    keeps: str, function: Any, noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(function)
    program = Program(net, budget="16MiB")
    assert all(net.agrees(program) for _ in range(2))
    y = program(net.x)
    before = program._live.nbytes[Tier.DEVICE]
    del y
    monkeypatch.setattr(Spike, "keeps", keeps)
    noted.clear()
    y = program(net.x)
    assert noted
    times = STEPS if keeps == "more saved" else 1  # the others make it again
    assert program._live.nbytes[Tier.DEVICE] >= before + times * 64 * ROWS * SIDE * 4
    del y
    assert all(net.agrees(program) for _ in range(3))
    noted.clear()
    assert net.agrees(program)
    assert bool(noted) is (keeps == "on the context")  # which is not counted by what was saved


def test_a_class_that_each_call_makes_is_noted_and_not_kept_alive(noted: list[Any]) -> None:
    made: list[weakref.ref[Any]] = []

    def function(x: torch.Tensor, slope: float) -> Any:
        large = torch.ones(4)

        class Own(Spike):
            held = large

        made.append(weakref.ref(large))
        return Own.apply(x, slope)  # type: ignore[no-untyped-call]

    net = Net(function)
    program = Program(net, budget="16MiB")
    for _ in range(3):
        noted.clear()
        assert net.agrees(program)
        assert noted
    noted.clear()
    gc.collect()
    assert all(reference() is None for reference in made)


def test_hooks_of_users_see_what_they_would(noted: list[Any]) -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    def function(x: torch.Tensor, slope: float) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return Spike.apply(x, slope)  # type: ignore[no-untyped-call]

    net = Net(function)
    program = Program(net, budget="16MiB")
    for _ in range(3):
        assert net.agrees(program)
        assert len(seen) == 2 * STEPS  # of plain PyTorch as many as of the program
        seen.clear()


def test_differentiated_twice() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return 3 * gradients[0] * ctx.saved_tensors[0] ** 2

    def function(x: torch.Tensor) -> torch.Tensor:
        return (Cube.apply(x.sin()) * x).sum()  # type: ignore[no-any-return, no-untyped-call]

    program = Program(function, budget="16MiB")
    for _ in range(3):
        found = []
        for one in (function, program):
            x = torch.linspace(0.1, 1, 5).requires_grad_()
            (g,) = torch.autograd.grad(one(x), x, create_graph=True)
            found.append(torch.autograd.grad(g.sum(), x)[0])
        assert same(*found)


def test_what_fails_inside() -> None:
    class Fails(Spike):
        fails = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, slope: float, shown: Any = None) -> torch.Tensor:
            if Fails.fails:
                raise ValueError("no")
            return Spike.forward(ctx, x, slope)

    net = Net(Fails.apply)
    program = Program(net, budget="16MiB")
    assert all(net.agrees(program) for _ in range(2))
    Fails.fails = True
    with pytest.raises(ValueError, match="no"):
        program(net.x)
    gc.collect()
    assert program._live.nbytes[Tier.DEVICE] == 0
    Fails.fails = False
    assert all(net.agrees(program) for _ in range(2))


@pytest.mark.parametrize("what", ["saves", "gives"])
def test_what_grows_last_is_said(what: str, noted: list[Any]) -> None:
    """Nothing follows for which room could be made."""
    rows = 1

    class Grows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, *([x.repeat(rows, 1)] if what == "saves" else []))
            return x.repeat(rows, 1) if what == "gives" else x.sin()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            x = ctx.saved_tensors[0]
            return gradients[0].view(-1, *x.shape).sum(0) if what == "gives" else gradients[0] * x.cos()

    weight = torch.randn(64, 64, requires_grad=True)
    program = Program(lambda x: Grows.apply(x @ weight).sum(), budget="600KiB")  # type: ignore[no-untyped-call]
    for _ in range(3):
        noted.clear()
        program(torch.ones(64, 64)).backward()
    assert not noted
    rows = 60
    with pytest.warns(ts.BudgetExceeded, match="began like the call before, .* its last operation made or saved more"):
        program(torch.ones(64, 64)).backward()
    assert ts.report(program).exceeded is not None
    with pytest.raises(BudgetError):
        program(torch.ones(64, 64))
    rows = 1
    program(torch.ones(64, 64)).backward()


def test_a_custom_operation_that_keeps_tensors_on_its_context_is_counted(
    noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spike, "keeps", "on the context")
    net = Net(spike)
    program = Program(net, budget="120KiB")
    for _ in range(3):
        noted.clear()
        with pytest.warns(ts.BudgetExceeded, match="spike.* keeps 192 KiB on its context"):
            assert net.agrees(program)
        assert noted
        program.exceeded._said.clear()  # it would be said once


def test_what_functions_save_by_their_context_is_not_heard_by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, heard = torch.randn(SIDE, SIDE, requires_grad=True), list[Any]()
    hear = Along._heard

    def counted(self: Along, function: Any, *given: Any) -> Any:
        heard.append(function)
        return hear(self, function, *given)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10 * STEPS):
            x = Spike.apply(x @ weight, 2.0)
        return x.sum()

    program = Program(function, budget="16MiB")
    for _ in range(3):
        program(torch.ones(ROWS, SIDE)).backward()
    heard.clear()
    program(torch.ones(ROWS, SIDE)).backward()
    assert len(heard) <= 8
