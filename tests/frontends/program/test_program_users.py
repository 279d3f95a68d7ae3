"""What users put between a program and PyTorch: custom operations, functions and objects that calls are given, classes
of tensors, modes, hooks, settings. It is done right, or refused by name where something would have to run again."""

import contextlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy
import pytest
import torch
from side_by_side import compare, least
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.errors import GradientError, InputError
from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, X = nn.Parameter(torch.randn(16, 16) / 4), torch.randn(8, 16).requires_grad_()


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def often(body: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = body(x @ W)
        return x

    return program


def refused(program: Callable[..., Any], name: str) -> None:
    """With everything kept it is right; where something is to run again, it is refused."""
    few = least(often(torch.tanh), [W, X], given, 0)
    compare(program, [W, X], given, 10**7, planner="store_all", reruns=False)
    for planner in ("revolve", "auto"):
        run = Program(program, budget=3 * few, planner=planner)
        with pytest.raises(GradientError, match=name):
            run(*given()).sum().backward()


CALLS = {"count": 0}


@torch.library.custom_op("tapestream_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    CALLS["count"] += 1
    return x * torch.from_numpy(numpy.random.rand(*x.shape).astype("float32"))


@torch.library.custom_op("tapestream_tests::dropped", mutates_args=())
def dropped(x: torch.Tensor) -> torch.Tensor:
    CALLS["count"] += 1
    return x * (torch.rand_like(x) < 0.5)


STATE = torch.ones(16)


@torch.library.custom_op("tapestream_tests::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    STATE.add_(0.5)
    return x * STATE


@torch.library.custom_op("tapestream_tests::reading", mutates_args=())
def reading(x: torch.Tensor) -> torch.Tensor:
    return x * STATE


def _setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _back(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    x, y = ctx.saved_tensors
    return g * y / x


for _op in (noisy, dropped, counting, reading):
    _op.register_autograd(_back, setup_context=_setup)


def test_a_custom_operation_runs_once_until_it_is_run_again() -> None:
    CALLS["count"] = 0
    Program(often(dropped), budget="1MiB")(*given())
    assert CALLS["count"] == 10


def test_custom_operations_draw_from_torchs_generator() -> None:
    for planner in ("revolve", "auto"):
        run = compare(often(lambda x: torch.tanh(dropped(x))), [W, X], given, calls=4, planner=planner)
    assert run.report is not None
    assert run.report.reruns > 0


def test_custom_operations_that_draw_elsewhere_are_refused() -> None:
    few = least(often(torch.tanh), [W, X], given, 0)
    run = Program(often(noisy), budget=3 * few, planner="revolve")
    with pytest.raises(GradientError, match="draws from Python's or NumPy's"):
        run(*given()).sum().backward()


@pytest.mark.parametrize("operation", [counting, reading, torch.ops.tapestream_tests.counting])
def test_custom_operations_that_use_what_has_changed_are_refused(operation: Callable[..., Any]) -> None:
    few = least(often(torch.tanh), [W, X], given, 0)
    for planner in ("revolve", "auto"):
        run = Program(often(lambda x: torch.tanh(operation(x))), budget=3 * few, planner=planner)
        out = run(*given()).sum()
        STATE.add_(1)
        with pytest.raises(GradientError, match="not among its arguments and was written into"):
            out.backward()


FACTOR = [1.0]


def scaled_by_a_global(x: torch.Tensor) -> torch.Tensor:
    FACTOR[0] += 0.1
    other = torch.tanh(x).detach().clone()
    other.apply_(lambda number: number * FACTOR[0])
    return x * other


def far_from_itself(x: torch.Tensor) -> torch.Tensor:
    near = torch.tanh(x)
    loss = F.triplet_margin_with_distance_loss(
        x, x * 0.5, x.flip(0), distance_function=lambda a, b: ((a - b) * near).pow(2).sum(1)
    )
    return x / (1 + loss)


def captured(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    factor = [1.0]

    def body(x: torch.Tensor) -> torch.Tensor:
        factor[0] += 0.1
        other = torch.tanh(x).detach().clone()
        return x * other.map_(x.detach().clone(), lambda a, b: a + b * factor[0])

    return body


@pytest.mark.parametrize("body", [scaled_by_a_global, captured(X)])
def test_functions_that_calls_are_given_find_what_they_found(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    few = least(often(torch.tanh), [W, X], given, 0)
    for planner in ("revolve", "auto"):
        run = Program(often(body), budget=3 * few, planner=planner)
        with pytest.raises(GradientError, match="is given an object that was changed afterwards"):
            run(*given()).sum().backward()


def test_a_function_finds_the_tensor_that_it_has_captured() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = far_from_itself(x @ W)
        return x

    compare(program, [W, X], given, calls=4, planner="revolve")  # each call has a variable of its own

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x @ W
            near = torch.tanh(x)
            loss = F.triplet_margin_with_distance_loss(
                x,
                x * 0.5,
                x.flip(0),
                distance_function=lambda a, b: ((a - b) * near).pow(2).sum(1),  # noqa: B023
            )
            x = x / (1 + loss)
        return x

    refused(loop, "is given an object that was changed afterwards")


def test_a_function_of_which_only_what_it_saves_is_asked_finds_what_it_found() -> None:
    flags = [[True] for _ in range(10)]

    def program(x: torch.Tensor) -> torch.Tensor:
        for flag in flags:
            x = torch.tanh(x @ W)
            loss = F.triplet_margin_with_distance_loss(
                x, x * 0.5, x.flip(0), reduction="none", margin=5.0,
                distance_function=lambda a, b, flag=flag: (a * b if flag[0] else b * b).sum(1),
            )  # fmt: skip
            x = x + loss[:, None]
        return x

    wanted = torch.autograd.grad(program(*given()).sum(), [W, X])
    refusals = 0
    for times in (3, 5):
        run = Program(program, budget=times * least(often(torch.tanh), [W, X], given, 0))
        for flag in (*flags, *flags):
            out = run(*given()).sum()
            try:
                flag[0] = False
                assert all(map(torch.equal, torch.autograd.grad(out, [W, X]), wanted))
            except GradientError:
                refusals += 1
            finally:
                flag[0] = True
                del out
    assert refusals > 0


class Kind(IntEnum):
    HALF, TWICE = 0, 1


class Scale(torch.autograd.Function):
    """Looks at what it is given, which is no number to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: Any) -> torch.Tensor:
        ctx.by = 2.0 if kind is Kind.TWICE or isinstance(kind, Place) else 0.5
        ctx.save_for_backward(x * ctx.by)
        return x * ctx.by

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (scaled,) = ctx.saved_tensors
        return gradients[0] * ctx.by + 0 * scaled, None


class Place:
    def __init__(self) -> None:
        self.at = 0

    def __index__(self) -> int:
        return self.at


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "take", [lambda x, i: x[:, i], lambda x, i: x.select(1, i), lambda x, i: x[i], lambda x, i: x[i:].sum(0)]
)
def test_an_index_is_what_it_was(take: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        place = Place()
        for number in range(8):
            place.at = number
            x = torch.tanh(x @ W) * take(x, place).sum()
        return x

    for planner in ("revolve", "auto"):
        compare(program, [W, X], given, calls=4, planner=planner)


def test_what_is_no_number_to_a_function_stays_what_it_is() -> None:
    apply: Callable[..., torch.Tensor] = Scale.apply
    for kind in (Kind.TWICE, Kind.HALF, Place()):
        for planner in ("revolve", "auto"):
            compare(often(lambda x, k=kind: torch.tanh(apply(x, k))), [W, X], given, calls=3, planner=planner)
    compare(often(lambda x: torch.tanh(x * numpy.float32(1.5) - numpy.float64(-0.0))), [W, X], given, calls=3)


class Doubled(torch.Tensor):
    """Results of torch.tanh come twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.tanh else out


class Plain(torch.Tensor):
    """Does nothing of its own."""


def test_classes_of_tensors_with_a_will_of_their_own() -> None:
    few = least(often(torch.tanh), [W, X], given, 0)

    def of(kind: type[torch.Tensor]) -> tuple[torch.Tensor]:
        return (X.detach().clone().as_subclass(kind).requires_grad_(),)

    compare(often(torch.tanh), [W], lambda: of(Doubled), 10**7, planner="store_all", reruns=False)
    run = Program(often(torch.tanh), budget=3 * few, planner="revolve")
    with pytest.raises(GradientError, match=r"tensors of class Doubled .*__torch_function__"):
        run(*of(Doubled)).sum().backward()
    again = compare(often(torch.tanh), [W], lambda: of(Plain), 3 * few, planner="revolve")
    assert again.report is not None
    assert again.report.reruns > 0


class Halves(TorchDispatchMode):
    """Every hyperbolic tangent is half of what it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.tanh.default else out


@pytest.mark.parametrize("around", [True, False])
def test_dispatch_modes_are_entered_again(around: bool) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ W)
        with Halves():
            x = often(torch.tanh)(x)
        return torch.tanh(x @ W)

    def call(run: Callable[..., Any]) -> Callable[..., Any]:
        def within(x: torch.Tensor) -> torch.Tensor:
            with Halves():
                out: torch.Tensor = run(x)
            return out

        return within if around else run

    function = often(torch.tanh) if around else inside
    budget = 2 * least(function, [W, X], given, 0)
    for planner in ("revolve", "auto"):
        run = Program(function, budget=budget, planner=planner)
        for _ in range(4):
            wanted = torch.autograd.grad(call(function)(*given()).sum(), [W, X])
            found = torch.autograd.grad(call(run)(*given()).sum(), [W, X])
            assert all(map(torch.equal, found, wanted))
        assert run.report is not None
        assert run.report.reruns > 0 or planner == "auto"


def test_dispatch_modes_around_backward_alone_are_not_entered_for_replays() -> None:
    function = often(torch.tanh)
    run = Program(function, budget=2 * least(function, [W, X], given, 0), planner="revolve")
    for _ in range(3):
        outs = [function(*given()).sum(), run(*given()).sum()]
        with Halves():
            wanted, found = (torch.autograd.grad(out, [W, X]) for out in outs)
        assert all(map(torch.equal, found, wanted))
    assert run.report is not None
    assert run.report.reruns > 0


def test_settings_are_those_of_the_first_run() -> None:
    """Denormal numbers count, and as many threads work, though both are set otherwise before backward."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x * 1e-38) * 1e38
        return x * W.sum()

    def gradient(run: Callable[..., Any]) -> torch.Tensor:
        out = run(*given()).sum()
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            torch.set_flush_denormal(True)
            return torch.autograd.grad(out, [X])[0]
        finally:
            torch.set_flush_denormal(False)
            assert torch.get_num_threads() == threads + 1
            torch.set_num_threads(threads)

    budget = 2 * least(program, [W, X], given, 0)
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormal numbers")
    wanted = gradient(program)
    for planner in ("revolve", "auto"):
        run = Program(program, budget=budget, planner=planner)
        for _ in range(3):
            assert torch.equal(gradient(run), wanted)


def test_hooks_around_a_call_are_refused_and_inside_are_called() -> None:
    run = Program(often(torch.tanh), budget="1MiB")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor / 2)
    for around in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        with hooks, around, pytest.raises(InputError, match="inside saved_tensors_hooks"):
            run(*given())
    with hooks, torch.no_grad():
        run(*given())


@pytest.mark.parametrize("times", [1, 2])
def test_save_on_cpu_around_a_call_is_left_out(times: int) -> None:
    """The budget says what is kept where: noted, planned and unnoted calls, and `explain`."""
    program = often(torch.tanh)

    def gradient(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(function(*given()).sum(), W)[0]

    wanted = gradient(program)
    for budget in (least(program, [W, X], given, 0), 1 << 24):
        run = Program(program, budget=budget)
        for _ in range(4):
            with contextlib.ExitStack() as stack:
                for _ in range(times):
                    stack.enter_context(torch.autograd.graph.save_on_cpu())
                found = gradient(run)
            assert torch.equal(found, wanted)
            assert torch.equal(gradient(run), wanted)
        assert run.report is not None
        with torch.autograd.graph.save_on_cpu():
            assert run.explain(*given())


def test_tensors_made_in_inference_mode_are_refused_and_backward_in_it_is_right() -> None:
    with torch.inference_mode():
        made = torch.ones(16, 16)
    run = Program(often(lambda x: torch.tanh(x * made[0])), budget="1MiB")
    with pytest.raises(InputError, match="made in inference mode"):
        run(*given())
    budget = 2 * least(often(torch.tanh), [W, X], given, 0)
    run = Program(often(torch.tanh), budget=budget, planner="revolve")
    wanted = torch.autograd.grad(often(torch.tanh)(*given()).sum(), [W, X])
    out = run(*given()).sum()
    with torch.inference_mode():
        found = torch.autograd.grad(out, [W, X])
    assert all(map(torch.equal, found, wanted))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use of it
def test_switched_needs_of_values_are_refused_by_name() -> None:
    def needed_for_a_while(x: torch.Tensor) -> torch.Tensor:
        other = torch.ones(8, 16)
        x = x + other
        other.requires_grad_()
        x = torch.tanh(x * other)
        other.requires_grad_(False)
        return x * other

    refused(often(needed_for_a_while), r"requires_grad_\) failed in a replay")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_frozen_for_a_while_is_as_it_was_at_each_call(by_name: bool) -> None:
    """As the generator's step of an adversarial pair does."""
    generator, critic = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))

    def freeze(frozen: bool) -> None:
        for parameter in critic.parameters():
            if by_name:
                parameter.requires_grad = not frozen
            else:
                parameter.requires_grad_(requires_grad=not frozen)

    def both(x: torch.Tensor) -> torch.Tensor:
        real = x
        for _ in range(3):
            fake = torch.tanh(generator(x))
            freeze(True)
            fooled = torch.tanh(critic(fake))
            freeze(False)
            told = critic(fake.detach() * real).exp() - critic(real)
            x = fooled + 0.1 * told
        return x

    leaves = [*generator.parameters(), *critic.parameters(), X]
    for planner in ("revolve", "auto"):
        run = compare(both, leaves, given, calls=4, planner=planner, gradients_within=planner == "auto")
        assert run.report is not None
        assert run.report.reruns > 0 or planner == "auto"
    assert all(parameter.requires_grad for parameter in critic.parameters())


def test_a_frozen_tensor_may_be_written_into() -> None:
    bias = nn.Parameter(torch.ones(16))

    def program(x: torch.Tensor) -> torch.Tensor:
        for number in range(10):
            x = torch.tanh(x @ W) + bias
            if number == 4:
                bias.requires_grad_(False)
                bias.mul_(1.5)
                bias.requires_grad_(True)
                x = x.sin()
        return x

    def gradients(run: Callable[..., Any]) -> Any:
        with torch.no_grad():
            bias.fill_(1)
        return torch.autograd.grad(run(*given()).sum(), [W, X, bias])

    wanted = gradients(program)
    for planner in ("revolve", "auto"):
        run = Program(program, budget=3 * least(often(torch.tanh), [W, X], given, 0), planner=planner)
        for _ in range(3):
            assert all(map(torch.equal, gradients(run), wanted))


def test_a_need_switched_after_the_last_use_is_that_of_the_first_run() -> None:
    weight = nn.Parameter(W.detach().clone())

    def program(x: torch.Tensor) -> torch.Tensor:
        weight.requires_grad_(True)
        for _ in range(6):
            x = torch.tanh(x @ weight)
        weight.requires_grad_(False)
        return x * 2

    compare(program, [X], given, calls=3, planner="revolve")
