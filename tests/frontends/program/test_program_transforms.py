"""torch.func's transforms inside a program: plain PyTorch's bits, whatever runs again."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import compare, least, outcome, same
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch scripts what it differentiates

WIDTH, ROWS, TIMES = 6, 4, 5
Function = Callable[[torch.Tensor], torch.Tensor]
Inner = Callable[[Function, torch.Tensor, torch.Tensor], torch.Tensor]
torch.manual_seed(0)
LAYER, DIRECTION = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
LEAVES = list(LAYER.parameters())


def given() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH),)


def half(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A pullback called twice, with arithmetic of the program between."""
    out, back = torch.func.vjp(f, x)
    (first,) = back(v)
    (second,) = back(torch.sin(first) * out)
    return first + second


def auxiliary(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    _, back, aux = torch.func.vjp(lambda z: (f(z), z.cos()), x, has_aux=True)
    (found,) = back(v)
    return found * aux


def captured(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A function that closes over a value of the program."""
    scale = torch.tanh(x.sum(0) @ LAYER.weight)
    return torch.func.vmap(lambda row: f(row) * scale)(x)


def functional(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Gradients by sample of parameters that the program makes."""
    made = {name: p * 1.5 for name, p in LAYER.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(LAYER, parameters, (row,))
        return torch.tanh(out).square().sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(made, x)
    return x + (by_sample["weight"].sum(-1) * by_sample["bias"]).tanh()


def noisy(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: f(row) + torch.randn_like(row), randomness="different")(x)


def nested(f: Function, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: torch.func.jvp(torch.func.grad(lambda z: f(z).sum()), (row,), (row,))[1])(x)


EVERY_ROW = torch.func.vmap(lambda row: torch.tanh(LAYER(row)))

INNER: dict[str, Inner] = {
    "vmap": lambda f, x, v: torch.func.vmap(f)(x),
    "vmap in chunks": lambda f, x, v: torch.func.vmap(f, chunk_size=2)(x),
    "made before": lambda f, x, v: EVERY_ROW(x) + torch.vmap(f, in_dims=1, out_dims=1)(x.T @ v).T[:ROWS],
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "vjp": lambda f, x, v: torch.func.vjp(f, x)[1](v)[0],
    "jacrev": lambda f, x, v: torch.func.jacrev(f)(x[0]).sum(0) + x,
    "jacrev in chunks": lambda f, x, v: torch.func.jacrev(f, chunk_size=1)(x[0]).sum(0) + x,
    "jacfwd": lambda f, x, v: torch.func.jacfwd(f)(x[0]).sum(0) + x,
    "grad": lambda f, x, v: torch.func.grad(lambda z: f(z).square().sum())(x),
    "grad and value": lambda f, x, v: torch.func.grad_and_value(lambda z: f(z).square().sum())(x)[0],
    "hessian": lambda f, x, v: torch.func.hessian(lambda z: f(z).sum())(x[0]).sum(0) + x,
    "by sample": lambda f, x, v: torch.func.vmap(torch.func.grad(lambda z: f(z).square().sum()))(x),
    "half": half,
    "auxiliary": auxiliary,
    "captured": captured,
    "functional": functional,
    "noisy": noisy,
    "nested": nested,
}


def program_of(how: str, times: int = TIMES) -> Function:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            y = torch.sin(x * 1.1).exp() * 0.3  # which plain PyTorch keeps, and a program drops
            x = y + 0.5 * INNER[how](lambda z: torch.tanh(LAYER(z)), y, DIRECTION)
            x = torch.tanh(x * 0.7) + y.cos()
        return x.square().sum()

    return program


@pytest.mark.thinned(4)
@pytest.mark.parametrize("how", INNER)
def test_with_little_memory(how: str) -> None:
    compare(program_of(how), LEAVES, given)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", INNER)
def test_with_all_memory(how: str) -> None:
    compare(program_of(how), LEAVES, given, "1MiB", calls=3, planner="auto", reruns=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", ["vmap", "jvp", "captured", "half"])
def test_what_is_saved_inside_is_dropped(how: str) -> None:
    """The least budget grows far less than what plain PyTorch keeps."""
    few, many = (least(program_of(how, times), LEAVES, given, 0) for times in (4, 64))
    assert many < 8 * few


@pytest.mark.thinned(6)
@pytest.mark.parametrize("how", INNER)
def test_nothing_stays_when_the_call_is_over(how: str) -> None:
    made = list[weakref.ref[torch.Tensor]]()

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        made.append(weakref.ref(x))
        return INNER[how](lambda z: torch.tanh(LAYER(z)), x, DIRECTION).sum()

    run = ts.Program(program, budget="1MiB")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            run(*given()).backward()
        assert [ref() for ref in made] == [None] * 3
    finally:
        gc.enable()


def test_a_pullback_that_outlives_the_program() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out, back = torch.func.vjp(lambda z: torch.tanh(LAYER(z)), torch.sin(x))
        return out.sum(), back

    def step(run: Any) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            out, back = run(x)
            total: torch.Tensor = out + back(DIRECTION)[0].square().sum()
            return total

        return outcome(function, LEAVES, given)

    wanted, found = step(program), step(ts.Program(program, budget="1MiB"))
    assert all(map(same, wanted[2], found[2]))
    assert torch.equal(wanted[0][0], found[0][0])


@pytest.mark.parametrize("how", ["vmap", "vjp", "jvp", "grad", "hessian"])
def test_a_parameter_that_is_changed_before_backward_is_refused(how: str) -> None:
    run = ts.Program(program_of(how), budget=3 * least(program_of(how), LEAVES, given, 0) // 2, planner="revolve")
    before = [p.detach().clone() for p in LEAVES]
    try:
        loss = run(*given())
        with torch.no_grad():
            LAYER.weight.mul_(0.5)
        with pytest.raises((GradientError, RuntimeError), match=r"written into|modified|changed"):
            loss.backward()
    finally:
        with torch.no_grad():
            for p, value in zip(LEAVES, before, strict=True):
                p.copy_(value)


def test_what_a_pullback_was_made_of_is_written_into() -> None:
    """The value that the program gives to vjp, after it: the replay makes it again, or says that it cannot."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(TIMES):
            y = torch.sin(x)
            _, back = torch.func.vjp(lambda z: torch.tanh(LAYER(z)), y)
            (found,) = back(DIRECTION)
            x = found.exp() + torch.cos(x)
            y.zero_()
        return x.square().sum()

    with pytest.raises((GradientError, RuntimeError), match=r"written into|modified by an inplace"):
        compare(program, LEAVES, given)


def test_a_transform_that_fails_leaves_everything_as_it_was() -> None:
    fails = True

    def row(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ValueError("the user's own")
        return torch.tanh(LAYER(x))

    run = ts.Program(lambda x: torch.func.vmap(row)(torch.sin(x)).sum(), budget="1MiB")
    with pytest.raises(ValueError, match="the user's own"):
        run(*given())
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    fails = False
    wanted = outcome(lambda x: torch.func.vmap(row)(torch.sin(x)).sum(), LEAVES, given)
    assert all(map(same, wanted[2], outcome(run, LEAVES, given)[2]))


def test_hooks_of_the_users_own_are_pytorchs_matter() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.func.grad(lambda z: torch.tanh(LAYER(z)).sum())(x)

    for run in (program, ts.Program(program, budget="1MiB")):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            run(*given())
