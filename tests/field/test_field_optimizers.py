"""Steps that look further than one tensor, or count, as people write them: exact, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, HOMES, WIDTH, rows, streamed
from exact import Trace, assert_same, copy_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tapestream as ts
from tapestream.errors import InputError

COUNT = 4


def net() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)])


def backward(model: Any, step: int) -> None:
    model(rows(step)).square().mean().backward()


def clipped(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def clipped_by_block(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    for block in model:
        nn.utils.clip_grad_norm_(block.parameters(), 0.01)
    optimizer.step()


def centralized(model: Any, optimizer: Any, step: int) -> None:
    """Gradients without the mean of their rows."""
    backward(model, step)
    for p in model.parameters():
        if p.grad.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
    optimizer.step()


def two_steps(model: Any, optimizer: Any, step: int) -> None:
    """Sharpness-aware: up along all gradients by their norm, and back before the step."""
    backward(model, step)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = [p.grad * (0.05 / norm) for p in model.parameters()]
        for p, by in zip(model.parameters(), moved, strict=True):
            p.add_(by)
    optimizer.zero_grad()
    backward(model, step)
    with torch.no_grad():
        for p, by in zip(model.parameters(), moved, strict=True):
            p.sub_(by)
    optimizer.step()


def noisy(model: Any, optimizer: Any, step: int) -> None:
    """Langevin: noise on all weights after the step."""
    backward(model, step)
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape), alpha=0.001)


def scheduled(model: Any, optimizer: Any, step: int) -> None:
    """A rate that depends on all gradients."""
    backward(model, step)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (1 + float(norm))
    optimizer.step()


def skipped(model: Any, optimizer: Any, step: int) -> None:
    """Where a gradient is too large."""
    backward(model, step)
    if all(bool(p.grad.isfinite().all()) for p in model.parameters()) and step != 1:
        optimizer.step()


STEPS = (clipped, clipped_by_block, centralized, two_steps, noisy, scheduled, skipped)


def trained(model: Any, optimizer: Any, stepped: Callable[[Any, Any, int], None]) -> Trace:
    trace: Trace = {}
    for step in range(3):
        torch.manual_seed(step)
        stepped(model, optimizer, step)
        optimizer.zero_grad()
        trace |= {f"{step} {name}": copy_of(t) for name, t in model.state_dict().items()}
    return trace


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("stepped", STEPS)
def test_steps(stepped: Callable[[Any, Any, int], None], home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net()
    expected = trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), stepped)
    with streamed(net, home, tmp_path, 2**16) as ours:
        assert_same(expected, trained(ours, ts.optimizer(ours, torch.optim.AdamW, lr=0.01), stepped))


class TrustRatio(torch.optim.Optimizer):
    """By the norms of a tensor and of its gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self.moved(group):
                p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))

    def moved(self, group: Any) -> Any:
        return [p for p in group["params"] if p.grad is not None]


class Signs(TrustRatio):
    """Counts in a state of each tensor, and takes the signs of two means."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in self.moved(group):
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                state["count"] = state.get("count", 0) + 1
                p.sub_(mean.lerp(p.grad, 0.1).sign(), alpha=group["lr"] / state["count"])
                mean.lerp_(p.grad, 0.01)


class Whitened(TrustRatio):
    """Matrices by roots of sums of their own products, of other shapes than theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in self.moved(group):
                g = p.grad if p.dim() == 2 else p.grad[:, None]
                left = self.state[p].setdefault("left", torch.eye(len(g)) * 1e-3)
                left.add_(g @ g.T)
                values, vectors = torch.linalg.eigh(left)
                p.sub_((vectors @ (values.clamp_min(1e-6) ** -0.25).diag() @ vectors.T @ g).view_as(p), alpha=0.01)


class LargestOfAll(TrustRatio):
    """By the largest gradient of all tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in self.moved(group)]
        most = max(float(g.abs().max()) for g in grads) if grads else 1.0
        for group in self.param_groups:
            for p in self.moved(group):
                p.sub_(p.grad, alpha=group["lr"] / most)


class InTurns(TrustRatio):
    """Another tensor in each step."""

    turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in self.moved(group)]
        if parameters:
            p = parameters[self.turn % len(parameters)]
            p.sub_(p.grad, alpha=0.1)
        self.turn += 1


def stepped_by_it(model: Any, optimizer: Any, step: int) -> None:
    backward(model, step)
    optimizer.step()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("make", [TrustRatio, Signs, Whitened])
def test_classes(make: type[torch.optim.Optimizer], home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net()
    expected = trained(model, make(model.parameters(), lr=0.01), stepped_by_it)  # type: ignore[call-arg]
    with streamed(net, home, tmp_path, 2**16) as ours:
        assert_same(expected, trained(ours, ts.optimizer(ours, make, lr=0.01), stepped_by_it))


@pytest.mark.parametrize("make", [LargestOfAll, InTurns])
def test_classes_that_look_across_tensors(make: Any, tmp_path: Path) -> None:
    """Refused, and what the error advises works: the class itself, on all parameters at once."""
    torch.manual_seed(0)
    model = net()
    expected = trained(model, make(model.parameters()), stepped_by_it)
    with streamed(net, "disk", tmp_path, AMPLE) as ours:
        with pytest.raises(InputError, match=f"make it yourself, {make.__name__}"):
            ts.optimizer(ours, make, lr=0.01)
        assert_same(expected, trained(ours, make(ours.parameters()), stepped_by_it))


@pytest.mark.parametrize("home", HOMES)
def test_averages_of_weights(home: str, tmp_path: Path) -> None:
    """Kept by the user, of all weights after each step."""

    def run(model: Any, optimizer: Any) -> Trace:
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(3):
            stepped_by_it(model, optimizer, step)
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                averages[name].lerp_(p.detach(), 0.1)
        return {name: copy_of(t) for name, t in averages.items()}

    torch.manual_seed(0)
    model = net()
    expected = run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with streamed(net, home, tmp_path, 2**16) as ours:
        assert_same(expected, run(ours, ts.optimizer(ours, torch.optim.SGD, lr=0.1)))


def test_a_copy_that_averages(tmp_path: Path) -> None:
    """`AveragedModel` copies the model, which a streamed one refuses; one of a plain copy takes its weights."""
    with streamed(net, "disk", tmp_path, AMPLE) as ours:
        with pytest.raises(InputError, match="copied"):
            AveragedModel(ours, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        plain = net()
        plain.load_state_dict(ours.state_dict())
        average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        average.update_parameters(ours)
        assert all(torch.equal(a, b) for a, b in zip(average.module.parameters(), ours.parameters(), strict=True))
