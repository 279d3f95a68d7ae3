"""The end of a recompute is left out where nobody can tell, and only there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tapestream.frontends.chain import Chain
from tapestream.planning import profile
from tapestream.runner.runner import Runner
from tapestream.runner.unneeded import _NoKernels


class Double(torch.autograd.Function):
    """Keeps a number of its own instead of a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = 2 if bool((x.detach() * 0 == 0).all()) else 0
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return ctx.factor * g


def hooked(x: torch.Tensor) -> torch.Tensor:
    factor = x.detach().square().mean()  # made after the last saved tensor, kept by a closure
    if x.requires_grad:
        x.register_hook(lambda g: g * factor)
    return x


def scaled_in_backward(
    factor: Callable[[torch.Tensor], torch.Tensor | float],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The stage's end: it takes something of its result, past what autograd saves, into its gradient."""

    def end(x: torch.Tensor) -> torch.Tensor:
        found = factor(x.detach())
        if x.requires_grad:
            x.register_hook(lambda g: (g * found).to(g.dtype))
        return x

    return end


def filled(fill: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A new tensor that something writes the result into."""

    def factor(x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(4, 16)
        fill(made, x)
        return 1 + made.abs()

    return factor


def by_array(x: torch.Tensor) -> torch.Tensor:
    return x + 0 if x.detach().numpy()[0].mean() > 0 else -x


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x + 0 if sum(x.detach()[0].tolist()) > 0 else -x


def branching(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.detach().sum().item() > 0 else x - 1


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


class Stage(nn.Module):
    """Two products, the second of which ends the stage but for ``end``."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.end = nn.Linear(16, 32), nn.Linear(32, 16, bias=bias), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.down(torch.tanh(self.up(x))))


ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda x: x,
    "views and sums": lambda x: (x.reshape(-1, 2, 8).transpose(0, 1) + 1).flatten(1)[:, :16],
    "in place": lambda x: x.add_(1).mul_(3),
    "another saved tensor": torch.sin,
    "hook": hooked,
    "branch": branching,
    "branch by an array": by_array,
    "branch by a list": by_list,
    "to a type at a place": scaled_in_backward(lambda x: 1 + x[:, 5:6].to("cpu", torch.float64).abs()),
    "to another's type": scaled_in_backward(lambda x: 1 + x.to(torch.zeros((), dtype=torch.float64)).abs()),
    "array": scaled_in_backward(lambda x: 1 + float(abs(x.numpy()[1:3]).sum())),
    "list": scaled_in_backward(lambda x: 1 + abs(sum(x[0].tolist()))),
    "into a list": scaled_in_backward(filled(lambda made, x: torch._foreach_add_([made], [x]))),
    "copied into a list": scaled_in_backward(filled(lambda made, x: torch._foreach_copy_([made], [x]))),
    "into a result": scaled_in_backward(filled(lambda made, x: torch.mul(x * 2, 0.5, out=made))),
    "function": Double.apply,  # type: ignore[dict-item]
    "checkpoint": checkpointed,
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short stages too."""
    monkeypatch.setattr(profile, "_LONG_SECONDS", 0.0)


def gradients(run: Callable[[torch.Tensor], torch.Tensor], stages: nn.ModuleList) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
    y = run(x)
    return list(torch.autograd.grad(y.square().sum(), [x, *stages.parameters()]))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("end", ENDS)
def test_gradients_are_those_of_plain_pytorch(end: str) -> None:
    torch.manual_seed(1)
    kind = ENDS[end]
    stages = nn.ModuleList([Stage(ENDS["nothing"]), *(Stage(kind) for _ in range(4)), nn.Flatten(0, -1)])
    if end == "views and sums":
        stages = nn.ModuleList([Stage(kind), nn.Unflatten(1, (2, 8)), nn.Flatten(0, 1)])

    def plain(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x)
        return x

    chain = Chain(list(stages), budget="64KiB", planner="revolve", slots=1)
    expected = gradients(plain, stages)
    for _ in range(2):
        for one, other in zip(expected, gradients(chain, stages), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("always")
def test_the_last_product_of_every_recompute_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first one on, in which it is found out where the mode that leaves it out must begin."""
    found: list[Any] = []
    left_out = _NoKernels._left_out

    def watched(self: _NoKernels, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func)
        return left_out(self, func, args, kwargs)

    monkeypatch.setattr(_NoKernels, "_left_out", watched)
    for bias in (True, False):
        stages = nn.ModuleList(Stage(ENDS["nothing"], bias) for _ in range(5))
        chain = Chain(list(stages), budget="64KiB", planner="revolve", slots=1)
        for _ in range(3):
            found.clear()
            gradients(chain, stages)
            product = torch.ops.aten.addmm.default if bias else torch.ops.aten.mm.default
            # Every stage is recorded once, and all but the last one's record is a recompute just before its backward.
            assert found.count(product) == len(stages) - 1


@pytest.mark.usefixtures("always")
def test_a_stage_that_saves_more_than_before_is_run_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moody(Stage):
        more = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.sin(y) if self.more else y + 0

    stages = nn.ModuleList(Moody(ENDS["nothing"]) for _ in range(4))
    chain = Chain(list(stages), budget="64KiB", planner="revolve", slots=1)
    gradients(chain, stages)
    for stage in stages:
        stage.more = True
    left_out: list[int | None] = []
    record = Runner._record
    monkeypatch.setattr(
        Runner, "_record", lambda self, k, state, saved: left_out.append(saved) or record(self, k, state, saved)
    )

    def plain(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x)
        return x

    found = gradients(chain, stages)
    assert any(saved is not None for saved in left_out)
    for one, other in zip(gradients(plain, stages), found, strict=True):
        assert torch.equal(one, other)
