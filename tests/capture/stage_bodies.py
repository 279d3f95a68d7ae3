"""What stages do that checkpointing could get wrong: each from a tensor to one of its shape."""

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import tapestream as ts

Body = Callable[[Any, torch.Tensor], torch.Tensor]
plain_checkpoint = functools.partial(checkpoint, use_reentrant=False)
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


@body
def two_levels(s: Any, x: torch.Tensor) -> torch.Tensor:
    def outer(y: torch.Tensor) -> torch.Tensor:
        return plain_checkpoint(lambda z: s.drop(torch.sin(s.lin(z))), y.cos()).exp()

    return plain_checkpoint(outer, x).tanh()


@body
def reentrant_inside(s: Any, x: torch.Tensor) -> torch.Tensor:
    return plain_checkpoint(lambda y: checkpoint(lambda z: s.lin(z).sin(), y.cos(), use_reentrant=True).exp(), x)


@body
def no_early_stop(s: Any, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return plain_checkpoint(lambda y: s.drop(torch.tanh(s.lin(y))).sin(), x)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


kept_products = functools.partial(create_selective_checkpoint_contexts, keep_products)


@body
def selective(s: Any, x: torch.Tensor) -> torch.Tensor:
    return plain_checkpoint(lambda y: s.drop(torch.tanh(s.lin(y))), x, context_fn=kept_products)


@body
def in_segments(s: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential([s.lin, s.drop, nn.Tanh()], 2, x, use_reentrant=False)


@body
def keywords_and_other_results(s: Any, x: torch.Tensor) -> torch.Tensor:
    def run(y: torch.Tensor, *, scale: list[Any], names: dict[str, int]) -> dict[str, Any]:
        return {"y": s.lin(y) * scale[names["first"]], "n": 3, "none": None, "t": (y.detach(),)}

    made = plain_checkpoint(run, x, scale=[x.sin(), None], names={"first": 0})
    return torch.tanh(made["y"] * made["n"] + made["t"][0])


@body
def raises_in_checkpoint(s: Any, x: torch.Tensor) -> torch.Tensor:
    def failing(y: torch.Tensor) -> torch.Tensor:
        raise KeyError(s.lin(y).shape)

    with contextlib.suppress(KeyError):
        plain_checkpoint(failing, x)
    with contextlib.suppress(RuntimeError):
        s.lin(x[:, :3])
    return torch.tanh(s.lin(x))


@body
def tensors_as_keywords(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.norm(input=s.lin(input=x)).unsqueeze(0)
    return nn.functional.scaled_dot_product_attention(query=h, key=h.sin(), value=x.unsqueeze(0)).squeeze(0) + x


@body
def detached_and_unused(s: Any, x: torch.Tensor) -> torch.Tensor:
    one, other = s.lin(x).chunk(2, 1)
    other.exp()
    return torch.cat([one.sin(), one.detach() * one], 1) + x


@body
def in_place(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.lin(x).sin()
    h.add_(1)[:, 0].mul_(2)
    return (h * 1).sigmoid_()


@body
def tensor_hook(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(s.lin(x))
    h.register_hook(lambda g: g * 0.5)
    return h * x


@body
def grad_fn_hook(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(s.lin(x))
    h.grad_fn.register_prehook(lambda gs: tuple(g * 0.5 for g in gs))
    return h * 2


@body
def input_hook(s: Any, x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)
    return torch.tanh(s.lin(x)) + x


def _halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@body
def hook_after_accumulation(s: Any, x: torch.Tensor) -> torch.Tensor:
    if not ts.recomputing():
        s.lin.weight.register_post_accumulate_grad_hook(_halve)
    return torch.tanh(s.lin(x))


@body
def hook_in_first_run(s: Any, x: torch.Tensor) -> torch.Tensor:
    if not ts.recomputing():
        s.lin.weight.register_hook(lambda g: None if g is None else g * 0.5)
    return torch.tanh(s.lin(x))


@body
def hook_in_each_run(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.lin.weight.register_hook(lambda g: None if g is None else g * 0.5)
    return torch.tanh(s.lin(x))


@body
def autocast_inside(s: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain_checkpoint(lambda y: torch.tanh(s.lin(y)), x).float() + x


@body
def no_grad_inside(s: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = s.norm(s.lin(x)).abs().mean()
        with torch.enable_grad():
            h = torch.tanh(s.lin(x))
    return h * mean


@body
def inference_inside(s: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        mean = s.lin(x).mean()
    return torch.tanh(s.lin(x)) + mean


@body
def saved_on_cpu(s: Any, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu(), saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        return torch.tanh(s.lin(x)).exp().sin()


@body
def no_saved_hooks(s: Any, x: torch.Tensor) -> torch.Tensor:
    with disable_saved_tensors_hooks("none here"):
        return torch.tanh(s.lin(x)).exp()


class Unmaterialised(torch.autograd.Function):
    """Saves input and output; has a result without gradient, and one that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        y, order = (x * w).tanh(), x.argsort(1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x, w, y)
        ctx.twice = x.detach() * 2
        return y, x.exp(), order, "label"

    @staticmethod
    def backward(ctx: Any, g: Any, unused: Any, *_: Any) -> Any:
        x, w, y = ctx.saved_tensors
        assert unused is None
        slope = g * (1 - y * y)
        return slope * w + ctx.twice, (slope * x).sum(0)


@body
def function_of_ones_own(s: Any, x: torch.Tensor) -> torch.Tensor:
    y, _, order, _ = Unmaterialised.apply(s.lin(x), s.norm.weight)
    return y * (order + 1) / 8


@body
def draws(s: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        h = s.drop(torch.tanh(s.lin(x)))
    own = torch.Generator().manual_seed(3)
    own = torch.rand(x.shape, generator=own) + torch.rand(x.shape, generator=s.generator)
    return s.drop(h) * own * random.random() + torch.rand(8)


@body
def late_generator(s: Any, x: torch.Tensor) -> torch.Tensor:
    own = s.__dict__.setdefault("own", torch.Generator().manual_seed(1))
    return torch.tanh(s.lin(x)) * torch.rand(x.shape, generator=own)


@body
def statistics(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.norm.running_var = s.norm.running_var * 0.9 + 0.1 * x.detach().var(0)
    return torch.tanh(s.norm(s.lin(x)) / (1 + s.norm.running_var))


@body
def grad_inside(s: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(s.lin(y)).square().sum(), y, create_graph=True)
    return torch.tanh(x - 0.1 * slope)


@body
def gives_its_input(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.lin(x)
    return x if len(x) == 4 else x * 2


@body
def gives_a_view(s: Any, x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)[:].view(x.shape)


@body
def gives_an_expanded_view(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x)).sum(0, keepdim=True).expand(x.shape)


@body
def counts_and_reads(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x)) * s.calls


@body
def reads_and_counts(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(s.lin(x)) * (s.runs + 1)
    if not ts.recomputing():
        s.runs += 1
    return h


@body
def counts_unguarded(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.runs += 1
    return torch.tanh(s.lin(x)) * s.runs


@body
def list_grows(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.__dict__.setdefault("log", []).append(1)
    return torch.tanh(s.lin(x)) * len(s.log)


@body
def asks_for_gradients(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(s.lin(x))
    return h if h.requires_grad and torch.is_grad_enabled() and h.grad_fn is not None else h * 2


@body
def asks_whether_leaf(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x)) * (2 if x.is_leaf else 1)
