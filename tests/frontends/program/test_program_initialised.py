"""Layers that set their parameters by the first batch that they see: all that plain PyTorch takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tapestream import track_memory
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.program.program import Program

Setting = Callable[["Normalise", torch.Tensor], None]


class Normalise(nn.Module):
    """Shift and scale are set in the first call."""

    def __init__(self, setting: Setting, width: int = 8) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("ready", torch.tensor(False))
        self.setting = setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.setting(self, x)
            self.ready.fill_(True)
        return (x - self.shift) / self.scale


def copied(layer: Normalise, x: torch.Tensor) -> None:
    with torch.no_grad():
        layer.shift.copy_(x.mean(0))
        layer.scale.copy_(x.std(0))


def copied_below(layer: Normalise, x: torch.Tensor) -> None:
    layer.shift.data.copy_(x.detach().mean(0))
    layer.scale.data.copy_(x.detach().std(0))


def in_parts(layer: Normalise, x: torch.Tensor) -> None:
    with torch.no_grad():
        layer.shift[:4] = x[:, :4].mean(0)
    layer.scale.data[2:] = x.detach().std(0)[2:]


def scaled(layer: Normalise, x: torch.Tensor) -> None:
    layer.shift.data += x.detach().mean(0)
    layer.scale.data.mul_(x.detach().std(0))


def drawn(layer: Normalise, x: torch.Tensor) -> None:
    nn.init.trunc_normal_(layer.shift)
    layer.scale.data.uniform_(0.5, 1.5)


def with_other_memory(layer: Normalise, x: torch.Tensor) -> None:
    layer.shift.data = x.detach().mean(0)
    layer.scale.data = x.detach()[0].abs() + 1


def with_other_memory_of_its_own(layer: Normalise, x: torch.Tensor) -> None:
    layer.shift.data = layer.shift.data - x.detach().mean(0)
    layer.scale.data = layer.scale.data * x.detach().std(0)


def read_in_between(layer: Normalise, x: torch.Tensor) -> None:
    with torch.no_grad():
        y = (x - layer.shift) / layer.scale
        layer.shift.copy_(y.mean(0))
        layer.scale.data.copy_(y.std(0) * layer.scale)


def written_twice(layer: Normalise, x: torch.Tensor) -> None:
    with torch.no_grad():
        layer.scale.copy_(x.std(0))
        y = x / layer.scale
        layer.scale.mul_(y.std(0) + 0.5)


def with_new_ones(layer: Normalise, x: torch.Tensor) -> None:
    layer.shift, layer.scale = nn.Parameter(x.detach().mean(0)), nn.Parameter(x.detach().std(0))


SETTINGS: list[Setting] = [
    copied, copied_below, in_parts, scaled, drawn, with_other_memory, with_other_memory_of_its_own, read_in_between,
    written_twice, with_new_ones,
]  # fmt: skip


def normalised(setting: Setting) -> nn.Sequential:
    parts = (nn.Sequential(Normalise(setting), nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*parts)


def lazy() -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())))


def lazy_convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.LazyConv1d(8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4)
    )


def course(model: nn.Module, run: Callable[[], torch.Tensor], calls: int = 4) -> list[Any]:
    found: list[Any] = []
    for k in range(calls):
        torch.manual_seed(k)
        for p in model.parameters():
            p.grad = None
        run().backward()
        found += [p.grad for p in model.parameters()]
        found += [t.clone() for t in model.state_dict().values()] + [torch.get_rng_state()]
    return found


def compared(build: Callable[[], nn.Module], budget: int) -> Program:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def both() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        torch.manual_seed(0)
        model = build()
        return model, lambda: model(x).square().mean()

    expected = course(*both())
    model, function = both()
    run = Program(function, budget=budget)
    for one, other in zip(expected, course(model, run), strict=True):
        assert torch.equal(one, other)
    return run


@pytest.mark.parametrize("budget", [1 << 22, 30 << 10])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.__name__)
def test_parameters_set_by_the_first_batch(setting: Setting, budget: int) -> None:
    compared(lambda: normalised(setting), budget)


@pytest.mark.parametrize(("build", "tight"), [(lazy, 30 << 10), (lazy_convolutions, 56 << 10)])
def test_lazy_modules(build: Callable[[], nn.Module], tight: int) -> None:
    compared(build, 1 << 22)
    compared(build, tight)


def test_what_is_set_takes_no_room_of_the_budget() -> None:
    x = torch.randn(32, 256)

    def build() -> nn.Module:
        return nn.Sequential(*(m for _ in range(4) for m in (nn.LazyLinear(256), nn.Tanh())))

    known = build()
    known(x)
    with pytest.raises(BudgetError) as error:
        Program(lambda: known(x).sum(), budget=1)()
    weights = sum(p.nbytes for p in known.parameters())
    budget = (error.value.least_nbytes or 0) + (40 << 10)  # for the states of generators: the first call draws
    assert budget < weights / 2
    model = build()
    with track_memory() as meter:
        Program(lambda: model(x).sum(), budget=budget)().backward()
    assert meter.peak_nbytes - 2 * weights <= budget


def test_what_backward_needs_is_not_given_other_memory() -> None:
    w = torch.ones(4, requires_grad=True)

    def function() -> torch.Tensor:
        y = w.sin()
        w.data = torch.zeros(4)
        return y + w.cos()

    with pytest.raises(InputError, match=r"sets \.data of a tensor that it has made or that backward needs"):
        Program(function, budget="1MiB")()


def test_used_and_then_written_into_below_autograd() -> None:
    """Plain PyTorch's backward takes the new numbers of what it has saved: that cannot be had of a replay."""

    def build() -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        w = torch.linspace(0.1, 1, 64).requires_grad_()

        def function() -> torch.Tensor:
            y = w.sin()
            w.data.mul_(0.5)
            for _ in range(40):
                y = (y * w).sin()
            return y.sum()

        return w, function

    w, function = build()
    function().backward()
    v, other = build()
    Program(other, budget="1MiB")().backward()
    assert w.grad is not None
    assert v.grad is not None
    assert torch.equal(w.grad, v.grad)
    with pytest.raises(GradientError, match=r"used, and then written into through its \.data"):
        Program(build()[1], budget=4_000)().backward()
