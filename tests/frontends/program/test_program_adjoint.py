"""Functions whose backward differentiates inside, for arguments that its code reaches by another way: a module's
parameters, which are arguments too (adjoint solvers). They keep much on their contexts, so they run again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError

SIDE, STEPS = 48, 10


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.unused = nn.Linear(SIDE, SIDE), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def gradients(outputs: torch.Tensor, inputs: list[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(outputs, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]


class Adjoint(torch.autograd.Function):
    """Saves parameters, and uses the field's own in backward."""

    @staticmethod
    def forward(ctx: Any, field: Field, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.field, ctx.kept = field, [x * k for k in range(8)]
        ctx.save_for_backward(x, *parameters)
        return x + 0.1 * field(x)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            outputs = own + 0.1 * ctx.field(own)
            return None, *gradients(outputs, [own, *parameters], cotangent)


class Materialized(Adjoint):
    """The same by other options of `torch.autograd.grad`, and by its plain form where all is used."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            outputs = own + 0.1 * ctx.field(own)
            found = torch.autograd.grad([outputs], [own, *parameters], [cotangent], materialize_grads=True)
        return None, *found


class InForward(Adjoint):
    """Takes the gradient in its forward."""

    @staticmethod
    def forward(ctx: Any, field: Field, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.kept = [x * k for k in range(8)]
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            outputs = own + 0.1 * field(own)
            ctx.slopes = gradients(outputs, [own, *parameters], torch.ones_like(x))
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return None, cotangent * ctx.slopes[0], *(s * cotangent.mean() for s in ctx.slopes[1:])


class Both(Adjoint):
    """Of the saved parameters and of the field's own, in one."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            outputs = nn.functional.linear(own, *parameters[1:]) + ctx.field(own)
            return None, *gradients(outputs, [own, *parameters], cotangent)


def program(function: type[Adjoint]) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    field = Field()
    parameters = [field.unused, field.inner.weight, field.inner.bias]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS):
            x = function.apply(field, x * 1.01, *parameters)  # type: ignore[no-untyped-call]
        return x.square().mean()

    return run, parameters


def least(function: type[Adjoint]) -> int:
    with pytest.raises(BudgetError) as refused:
        ts.Program(program(function)[0], budget=1, planner="revolve")(torch.ones(SIDE, SIDE).requires_grad_())
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def trained(function: type[Adjoint], budget: int | None, hooked: bool = False) -> list[torch.Tensor]:
    run, parameters = program(function)
    if hooked:
        parameters[1].register_hook(lambda g: g * 2)
    call = run if budget is None else ts.Program(run, budget=budget, planner="revolve")
    found = list[torch.Tensor]()
    for _ in range(3):
        x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
        loss = call(x)
        found += [loss.detach(), *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)]
    return found


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("function", [Adjoint, Materialized, InForward])
def test_gradients_taken_inside_are_those_of_the_arguments(function: type[Adjoint], hooked: bool) -> None:
    wanted = trained(function, None, hooked)
    assert wanted[3].abs().max() > 0
    for budget in (1 << 30, 2 * least(function)):
        found = trained(function, budget, hooked)
        assert all(map(torch.equal, found, wanted))


def test_by_both_ways_at_once_is_refused_by_name() -> None:
    trained(Both, 1 << 30)
    with pytest.raises(GradientError, match="Both takes a gradient inside of an argument that it uses, and reaches by"):
        trained(Both, 2 * least(Both))
