"""Objects that operations are given, gradients and statistics that a program reads, programs in programs."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from side_by_side import compare, least
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.executor.program.calls import patterns
from tapestream.executor.program.calls.seams import listener_now
from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, V = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
X = torch.randn(8, 16).requires_grad_()


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def tight(program: Callable[..., Any]) -> Program:
    return Program(program, budget=least(program, [W, V, X], given, 0), planner="revolve")


def gradients(run: Callable[..., Any]) -> list[torch.Tensor | None]:
    for leaf in (W, V, X):
        leaf.grad = None
    torch.manual_seed(1)
    run(*given()).sum().backward()
    return [leaf.grad for leaf in (W, V, X)]


def equal(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b))
               for a, b in zip(found, wanted, strict=True))  # fmt: skip


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Scale(torch.autograd.Function):
    """Times what an object holds: ``.value``, that of a box in a box, or what a function gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: Any) -> torch.Tensor:
        while not isinstance(by, (float, torch.Tensor)):
            by = by() if callable(by) else by[0] if isinstance(by, list) else by.value
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.by, None


def scaled(x: torch.Tensor, by: Any) -> torch.Tensor:
    return torch.tanh(Scale.apply(x @ W, by))  # type: ignore[no-untyped-call, no-any-return]


def by_an_attribute(x: torch.Tensor) -> torch.Tensor:
    box = Box(1.0)
    for k in range(8):
        box.value = 1 + k / 10
        x = scaled(x, box)
    return x


def by_an_attribute_below(x: torch.Tensor) -> torch.Tensor:
    box = Box([Box(1.0)])
    for k in range(8):
        box.value[0].value = 1 + k / 10
        x = scaled(x, [box])
    return x


def by_what_a_function_captured(x: torch.Tensor) -> torch.Tensor:
    by = 1.0

    def captured() -> float:
        return by

    for k in range(8):
        by = 1 + k / 10
        x = scaled(x, captured)
    return x


def by_an_argument_of_a_partial(x: torch.Tensor) -> torch.Tensor:
    box = Box(1.0)
    for k in range(8):
        box.value = 1 + k / 10
        x = scaled(x, functools.partial(getattr, box, "value"))
    return x


def by_a_tensor_in_an_object(x: torch.Tensor) -> torch.Tensor:
    box = Box(torch.ones(16))
    for _ in range(8):
        x = scaled(x, box)
        box.value = box.value * 0.9
    return x


@pytest.mark.parametrize(
    "program",
    [
        by_an_attribute,
        by_an_attribute_below,
        by_what_a_function_captured,
        by_an_argument_of_a_partial,
        by_a_tensor_in_an_object,
    ],
)
def test_an_object_that_changes_is_refused_where_it_is_needed_again(program: Callable[..., Any]) -> None:
    with pytest.raises(GradientError, match="given an object that was changed"):
        gradients(tight(program))
    assert equal(gradients(Program(program, budget="1MiB")), gradients(program))


def test_objects_made_each_time_and_those_that_stay() -> None:
    always = Box([Box(torch.full((16,), 0.9))])

    def program(x: torch.Tensor) -> torch.Tensor:
        for k in range(8):
            x = scaled(x, Box(1 + k / 10))
            x = scaled(x, always.value)
            with torch.no_grad():
                scaled(x, Box(2.0))
        return x

    found = compare(program, [W, X], given)
    assert found.report is not None
    assert found.report.reruns > 0


def test_an_object_that_nobody_holds_any_more() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for k in range(8):
            scaled(x, Box(1 + k / 10))  # given up with its graph, but a part of what is run again
            x = torch.tanh(x @ W)
        return x

    with pytest.raises(GradientError, match="object of type Box"):
        gradients(tight(program))
    assert equal(gradients(Program(program, budget="1MiB")), gradients(program))


def test_a_gradient_that_is_read_inside() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            assert V.grad is not None
            x = torch.tanh(x @ W) * (1 + V.grad.mean())
        for _ in range(6):
            x = torch.tanh(x @ V)
        return x

    def outcome(run: Callable[..., Any]) -> torch.Tensor:
        W.grad, V.grad = None, torch.full_like(V, 0.5)
        run(X * 1.0).sum().backward()
        assert W.grad is not None
        return W.grad

    with pytest.raises(BudgetError) as error:
        outcome(Program(program, budget=1, planner="revolve"))
    with pytest.raises(GradientError, match="gradient that backward adds to"):
        outcome(Program(program, budget=error.value.least_nbytes, planner="revolve"))
    assert torch.equal(outcome(Program(program, budget="1MiB")), outcome(program))


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: Any, variance: Any, training: bool) -> torch.Tensor:
        mean, variance = (t.value if isinstance(t, Box) else t for t in (mean, variance))
        return F.batch_norm(x, mean, variance, training=training)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None, None, None


@pytest.mark.parametrize("hidden", [False, True])
def test_running_statistics_inside_a_function(hidden: bool) -> None:
    norm = nn.BatchNorm1d(16)
    statistics = (norm.running_mean, norm.running_var)
    a, b = map(Box, statistics) if hidden else statistics

    def program(x: torch.Tensor, training: bool = True) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(Normed.apply(x @ W, a, b, training))  # type: ignore[no-untyped-call]
        return x

    with pytest.raises(GradientError, match="Normed wrote into running statistics"):
        gradients(tight(program))
    compare(lambda x: program(x, False), [W, X], given, modules=[norm])
    compare(program, [W, X], given, "1MiB", planner="auto", modules=[norm], reruns=False)


@pytest.mark.parametrize("read", [False, True])
def test_two_calls_with_batch_normalisation_before_one_backward(read: bool) -> None:
    """Replays use copies of buffers that the program writes into, also of those that it only reads from then on."""
    outcomes = []
    for way in ("plain", "program"):
        torch.manual_seed(0)
        norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(3))

        def program(x: torch.Tensor, norms: nn.ModuleList = norms) -> torch.Tensor:
            for k in range(9):
                x = torch.tanh(norms[k % 3](x @ W))
            if read:
                mean = norms[0].running_mean
                assert isinstance(mean, torch.Tensor)
                for _ in range(9):
                    x = torch.tanh(x @ W + mean)
            return x

        run: Callable[..., Any] = program
        if way == "program":
            state = {name: value.clone() for name, value in norms.state_dict().items()}
            run = Program(program, budget=(6 if read else 3) * least(program, [W, X], given, 0), planner="revolve")
            norms.load_state_dict(state)
        for leaf in (W, X):
            leaf.grad = None
        (run(X * 1.0) + run(X * 2.0)).sum().backward()
        if isinstance(run, Program):
            assert run.report is not None
            assert run.report.reruns > 0
        outcomes.append([W.grad, X.grad, *norms.buffers()])
    assert equal(*outcomes)


def step(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def test_an_optimizer_within_backward() -> None:
    def outcome(wrapped: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(2)
        weights = [nn.Parameter(torch.randn(16, 16) / 4) for _ in range(10)]

        def program(x: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                x = torch.tanh(x @ weight)
            return x

        run = Program(program, budget=least(program, weights, given, 0), planner="revolve") if wrapped else program
        for weight in weights:
            weight.grad = None
            weight.register_post_accumulate_grad_hook(step)
        run(X * 1.0).sum().backward()
        if isinstance(run, Program):
            assert run.report is not None
            assert run.report.reruns > 0
        return [weight.detach() for weight in weights]

    assert equal(outcome(True), outcome(False))


def test_a_program_inside_a_program_and_inside_a_module_taken_whole() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = F.dropout(torch.tanh(x @ V), 0.2)
        return scaled(x, 1.1)

    class Block(nn.Module):
        def __init__(self, inner: Callable[..., Any]) -> None:
            super().__init__()
            self.inner = [inner]
            self.v = V

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](torch.tanh(x))  # type: ignore[no-any-return]

    for opaque in ((), (Block,)):
        plain, inner = Block(steps), Block(Program(steps, budget=1))

        def program(x: torch.Tensor, block: nn.Module = inner) -> torch.Tensor:
            for _ in range(4):
                x = block(x @ W)
            return x

        def make(budget: int, program: Any = program, opaque: Any = opaque) -> Program:
            return Program(program, budget=budget, planner="revolve", opaque=opaque)

        with pytest.raises(BudgetError) as error:
            gradients(make(1))
        run = make(error.value.least_nbytes or 0)
        assert equal(gradients(run), gradients(lambda x, p=plain, f=program: f(x, p)))
        assert run.report is not None
        assert run.report.reruns > 0
        assert listener_now() is None


def test_checkpoints_inside_hide_nothing() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        def two(a: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(torch.tanh(a @ W) @ V), 0.2)

        for _ in range(8):
            x = checkpoint(two, x, use_reentrant=False)
        return x

    found = compare(program, [W, V, X], given)
    assert found.report is not None
    assert found.report.reruns > 0

    def failing(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ZeroDivisionError):
            checkpoint(lambda a: 1 // 0, x, use_reentrant=False)
        return program(x)

    compare(failing, [W, V, X], given, "1MiB", reruns=False)


class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, box: Any) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2, None


@pytest.mark.parametrize("way", ["hooks", "objects"])
def test_results_that_are_dropped_take_everything_with_them(way: str) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            z, x = x, torch.tanh(x @ W)
            if way == "hooks":
                x.register_hook(lambda g, z=z: g + 0 * z.detach())
            else:
                x = Forgets.apply(x, Box(x))  # type: ignore[no-untyped-call]
            made.append(weakref.ref(x))
        return x

    run = Program(program, budget="64KiB")
    for _ in range(3):
        result = run(X * 1.0)
        del result
        gc.collect()
        assert not any(run._live.nbytes.values())
        assert not [ref for ref in made if ref() is not None]


def test_classes_made_inside_go_and_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    classes: list[weakref.ref[type]] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        class Local(Forgets):
            held = torch.zeros(1000)

        classes.append(weakref.ref(Local))
        return Local.apply(x @ W, Local)  # type: ignore[no-untyped-call, no-any-return]

    run = Program(program, budget="1MiB")
    for _ in range(3):
        gradients(run)
    kinds = len(run._kinds.numbers)
    gc.collect()
    assert all(ref() is None for ref in classes)
    gradients(run)
    assert len(run._kinds.numbers) == kinds
    monkeypatch.setattr(patterns, "_MOST", 20)
    other = Program(lambda x: torch.tanh(x @ W).sum(), budget="1MiB")
    seen = set()
    for rows in range(1, 40):
        other(torch.ones(rows, 16)).backward()
        assert len(other._kinds.measured) <= 24
        seen |= set(other._kinds.numbers.values())
    assert max(seen) > len(other._kinds.numbers)


def test_the_budget_is_named_where_other_calls_hold_a_part_of_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ W)
        return x

    enough = least(program, [W, X], given, 0)
    run = Program(program, budget=enough, planner="revolve")
    waiting = [run(X * 1.0) for _ in range(20)]
    assert sum(run._live.nbytes.values()) <= enough
    with pytest.raises(BudgetError, match=f"gave way .* of the budget \\({enough} bytes\\)") as error:
        torch.stack(waiting).sum().backward()
    named = error.value.least_nbytes
    assert named is not None
    assert named > max(enough, sum(run._live.nbytes.values()))
    gradients(run)
    wider = Program(program, budget=named, planner="revolve")
    for _ in range(len(waiting) + 1):  # each done before the next: a first call holds as much as it finds room for
        wider(X * 1.0).sum().backward()


def test_what_is_no_function_of_tensors_is_refused_by_name() -> None:
    def generates(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x

    async def waits(x: torch.Tensor) -> torch.Tensor:
        return x

    class Generates(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x

    class Called:
        def __call__(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x

    for function in (generates, waits, Generates(), Called()):
        with pytest.raises(InputError, match="generator function or coroutine"):
            Program(function)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    for one in (nn.Linear, model[0]):
        Program(model, budget="1MiB", opaque=one)(X).sum().backward()
    with pytest.raises(InputError, match="opaque holds modules"):
        Program(model, opaque=3)  # type: ignore[arg-type]
