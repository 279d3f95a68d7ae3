"""A gradient of a streamed model with ``create_graph=True``: within the budget, or refused with what works."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from place import DEVICE
from streaming import options_of
from things_kept import alive, whole_peak
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.planning.exceeded import limit_of


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


MADE: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
    "gelu": lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()),
    "softplus": lambda: nn.Sequential(nn.Linear(32, 32), nn.Softplus()),
    "silu": lambda: nn.Sequential(nn.Linear(32, 32), nn.SiLU()),
    "residual": Residual,
}


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[MADE[kind]() for _ in range(8)]).to(DEVICE)


def penalty(model: nn.Module, *, of_weights: bool) -> torch.Tensor:
    """Of the gradient by the input or by the weights, squared."""
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    wanted = [*model.parameters()] if of_weights else [x]
    made = torch.autograd.grad(model(x).square().sum(), wanted, create_graph=True)
    return torch.stack([g.square().sum() for g in made]).sum()


@pytest.mark.on_cpu("bytes of the CPU are measured")
@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_it_is_exact_and_within_the_budget_that_is_named(kind: str, of_weights: bool) -> None:
    plain = net(kind)
    penalty(plain, of_weights=of_weights).backward()
    want = [p.grad for p in plain.parameters()]
    gc.collect()
    base, budget, named = alive(), 3 << 20, None
    for _ in range(3):
        model: Any = ts.stream(net(kind), budget=budget, **options_of("auto", None, "device"))  # type: ignore[arg-type]
        try:
            penalty(model, of_weights=of_weights).backward()
            found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

            def step(model: nn.Module = model) -> None:
                model.zero_grad()
                penalty(model, of_weights=of_weights).backward()

            peak = whole_peak(step, base)
            break
        except BudgetError as error:
            budget = named = error.least_nbytes
            assert named is not None
        finally:
            ts.unstream(model)
            del model
            gc.collect()
    same = [a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, want, strict=True)]
    assert all(same)
    assert peak - sum(g.nbytes for g in found if g is not None) <= limit_of(budget)


def test_what_cannot_be_stored_is_refused_before_it_is_used() -> None:
    plain = net("tanh")
    plan = ts.stream(net("tanh"), budget="1 GiB", **options_of("auto", None, "device"))  # type: ignore[arg-type]
    x = torch.zeros(256, 32, device=DEVICE)
    plan(x).sum().backward()
    stored = ts.report(plan).plan.peak_nbytes
    ts.unstream(plan)
    model = ts.stream(net("tanh"), budget=stored, **options_of("auto", None, "device"))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match=r"create_graph=True holds .* allow that much") as refused:
        penalty(model, of_weights=False)
    assert refused.value.least_nbytes is not None
    assert refused.value.least_nbytes > stored
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()  # and it goes on
    plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    ts.unstream(model)


def test_what_is_recomputed_is_refused_by_what_works() -> None:
    model = ts.stream(net("residual"), budget=1 << 20, **options_of("auto", None, "device"))  # type: ignore[arg-type]
    with pytest.raises((GradientError, BudgetError), match="allow"):
        penalty(model, of_weights=False)
    ts.unstream(model)
