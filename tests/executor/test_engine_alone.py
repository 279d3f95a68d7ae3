"""The engine alone, as somebody who writes a front end uses it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tapestream.costs import Profile
from tapestream.executor.engine import Engine
from tapestream.ir.actions import PhaseKind
from tapestream.planning.auto import make_plan

STAGES = 12


class Functions:
    """Segments: each stage is a function of one tensor."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.functions, self.runs = functions, 0

    def forward(self, live: list[Tensor], start: int, stop: int) -> Tensor:
        x = live.pop()
        with torch.no_grad():
            for function in self.functions[start:stop]:
                x = function(x)
                self.runs += 1
        return x

    def record(self, live: list[Tensor], stage: int, *, output_needed: bool) -> tuple[Tensor | None, Any]:
        x = live.pop().detach().requires_grad_()
        with torch.enable_grad():
            y = self.functions[stage](x)
        self.runs += 1
        return (y.detach() if output_needed else None), (x, y)

    def backward(self, tape: Any, stage: int, cotangent: Tensor) -> Tensor:
        x, y = tape
        return torch.autograd.grad(y, x, cotangent)[0]

    def keep(self, state: Tensor, stage: int) -> Tensor:
        return state

    def restore(self, kept: Tensor, stage: int, *, last: bool) -> Tensor:
        return kept


class OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, engine: Engine) -> Tensor:
        ctx.engine = engine
        engine.begin(x.detach())
        engine.run_phase(PhaseKind.FORWARD)
        found: Tensor = engine.hand_over(engine.stages)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.engine.cotangents[ctx.engine.stages] = gradient
        ctx.engine.run_phase(PhaseKind.BACKWARD)
        return ctx.engine.cotangents.pop(0), None


@pytest.mark.parametrize("slots", [1, 3, STAGES])
def test_a_front_end_in_forty_lines(slots: int) -> None:
    functions = [lambda x, k=k: torch.sin(x * (1 + k / 10)) for k in range(STAGES)]
    x = torch.randn(100, requires_grad=True)
    expected = x
    for function in functions:
        expected = function(expected)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    plan = make_plan(Profile.uniform(STAGES, state_nbytes=400, saved_nbytes=800), 1600 + 800 * slots)
    segments = Functions(functions)
    found = OneNode.apply(x, Engine(plan.schedule, segments))  # type: ignore[no-untyped-call]
    found.sum().backward()
    assert torch.equal(found, expected)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    assert segments.runs == plan.simulation.forwards
