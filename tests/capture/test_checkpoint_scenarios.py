"""What checkpointing is tried with, tried with all front ends: plain PyTorch's bits, or refused by name."""

import contextlib
import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from all_fronts import (
    FRONTS,
    WITHOUT_STREAM,
    Around,
    Net,
    assert_exact,
    assert_same,
    loss_of,
    net_for,
    observed,
    run_of,
    start,
)
from stage_bodies import BODIES, kept_products, plain_checkpoint
from stage_states import STATES, states_of
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import tapestream as ts
from tapestream.errors import TapestreamError


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


# ----------------------------------------------------------------------------------------------- what a stage does


RECOMPUTING = "Chain Join Loop stream"  # what runs Python again
REFUSED = {
    ("Program", "inference_inside"): "inference mode is entered inside the program",
    ("Program", "no_saved_hooks"): "hooks on saved tensors are disabled inside",
    ("Program", "grad_inside"): "is called inside with create_graph=True",
    ("Loop", "counts_and_reads"): "counts 'calls' of a Layer where",
    ("Loop", "reads_and_counts"): "counts 'calls', 'runs'|counts 'runs', 'calls'|'runs' of a Layer",
    ("Loop", "a_dataclass"): "the state holds no tensor",
    ("stream", "hooks_of_forward"): "a forward hook on a Layer inside stage 0",
    **{(front, "late_generator"): "makes a random generator at its first run" for front in ("Chain", "Join", "stream")},
    **{(front, "asks_whether_leaf"): "asks whether its argument is a leaf" for front in RECOMPUTING.split()},
    **{(front, "list_grows"): "changes 'Layer.log', which goes further" for front in RECOMPUTING.split()},
    **{(front, "hooks"): "called inside saved_tensors_hooks" for front in FRONTS},
    **{(front, "no_hooks"): "needs hooks on saved tensors, which are disabled here" for front in FRONTS},
}


def cases(names: Iterable[str], fronts: list[str] = FRONTS) -> pytest.MarkDecorator:
    """All front ends with all names."""
    made = []
    for (number, name), front in itertools.product(enumerate(names), fronts):
        rest = number % {"Join": 3, "Program": 2}.get(front, 1)  # is for make test-full
        made.append(pytest.param(front, name, marks=pytest.mark.full if rest else ()))
    return pytest.mark.parametrize(("front", "name"), made)


def refused(front: str, name: str) -> AbstractContextManager[Any]:
    message = REFUSED.get((front, name))
    return pytest.raises(TapestreamError, match=message) if message else contextlib.nullcontext()


@pytest.mark.thinned(2)
@cases(BODIES)
def test_what_a_stage_does(front: str, name: str, tmp_path: Path) -> None:
    with refused(front, name):
        assert_exact(front, BODIES[name], tmp_path)


# ------------------------------------------------------------------------------------- what modules are made to do


def drops(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.drop(torch.tanh(s.norm(s.lin(x))))


def layers_of(net: Net) -> list[Any]:
    return list(dict.fromkeys(net.layers))


def scaled(m: Any, found: Any, *_: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in found)


def halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def hook_backward(net: Net) -> None:
    for layer in layers_of(net):
        for module in (layer, layer.lin):
            module.register_full_backward_hook(scaled)
            module.register_full_backward_pre_hook(scaled)
        layer.lin.weight.register_hook(lambda g: g * 0.5)
        layer.lin.bias.register_post_accumulate_grad_hook(halve)


def hook_forward(net: Net) -> None:
    for layer in layers_of(net):
        layer.lin.register_forward_pre_hook(scaled)
        layer.register_forward_hook(lambda m, args, kwargs, out: out * 1.5, with_kwargs=True)


def parametrize(net: Net) -> None:
    for layer in layers_of(net):
        nn.utils.parametrizations.spectral_norm(layer.lin)


PREPARED: dict[str, Callable[[Net], object]] = {
    "hooks_of_backward": hook_backward,
    "hooks_of_forward": hook_forward,
    "parametrized": parametrize,
    "frozen": lambda net: net.requires_grad_(False),
    "one_frozen": lambda net: net.layers[0].requires_grad_(False),
    "evaluated": lambda net: net.eval(),
    "one_evaluated": lambda net: net.layers[1].eval(),
}


@cases(PREPARED)
def test_what_modules_are_made_to_do(front: str, name: str, tmp_path: Path) -> None:
    with refused(front, name):
        assert_exact(front, drops, tmp_path, prepare=PREPARED[name])


# ------------------------------------------------------------------------------------------ what is around a call


in_16_bits = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
no_hooks = functools.partial(disable_saved_tensors_hooks, "none here")
as_they_are = functools.partial(saved_tensors_hooks, lambda t: t, lambda t: t)


def keeps_dtype(s: Any, x: torch.Tensor) -> torch.Tensor:
    return drops(s, x).float()


AROUND = {
    "no_input_requires": Around(requires_grad=False),
    "seeded_between": Around(between=lambda: (torch.manual_seed(9), random.seed(9))),
    "drawn_between": Around(between=lambda: torch.rand(3)),
    "autocast": Around(forward=in_16_bits),
    "autocast_in_backward": Around(backward=in_16_bits),
    "no_grad_in_backward": Around(backward=torch.no_grad),
    "anomalies": Around(torch.autograd.detect_anomaly, torch.autograd.detect_anomaly),
    "saved_on_cpu_around": Around(forward=save_on_cpu),
    "hooks": Around(forward=as_they_are),
    "hooks_in_backward": Around(backward=as_they_are),
    "no_hooks": Around(forward=no_hooks),
    "no_hooks_in_backward": Around(backward=no_hooks),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@cases(AROUND)
def test_what_is_around_a_call(front: str, name: str, tmp_path: Path) -> None:
    with refused(front, name):
        assert_exact(front, keeps_dtype, tmp_path, AROUND[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("front", FRONTS)
def test_calls_without_gradients(front: str, mode: Any, tmp_path: Path) -> None:
    results = []
    for by in ("plain", front):
        net = net_for(front, drops)
        run = net if by == "plain" else run_of(front, list(net.layers), start(), tmp_path)
        torch.manual_seed(1)
        with mode():
            results.append({"y": run(start()), **dict(net.named_buffers())})
        assert not results[-1]["y"].requires_grad
        results[-1] |= {f"then {name}": value for name, value in observed(run, net, Around(), times=1)}
    assert_same(results[1], results[0])


@cases(["checkpoint", "selective_checkpoint"])
def test_checkpoints_around_calls(front: str, name: str, tmp_path: Path) -> None:
    """Such a checkpoint calls again in backward. What is around has run before."""
    options = {"context_fn": kept_products} if name == "selective_checkpoint" else {}
    seen = []
    for by in ("plain", front):
        net = net_for(front, BODIES["in_segments"])
        run = net if by == "plain" else run_of(front, list(net.layers), start(), tmp_path, budget=1 << 20)
        dict(observed(run, net, Around(), times=1))
        around = functools.partial(plain_checkpoint, run, **options)
        seen.append(dict(observed(around, net, Around())))
    assert_same(seen[1], seen[0])


# ------------------------------------------------------------------------------------------------------- states


@cases(STATES, WITHOUT_STREAM)
def test_states(front: str, name: str) -> None:
    stage, make = STATES[name]
    wanted = states_of(lambda x: functools.reduce(lambda y, f: f(y), [stage] * 4, x), make)
    with refused(front, name):
        for found, expected in zip(states_of(run_of(front, [stage] * 4, make()), make), wanted, strict=True):
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


# ------------------------------------------------------------------------------------------------ what goes wrong


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, when: list[str]) -> torch.Tensor:
        ctx.when = when
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        if ctx.when[0] == "backward":
            raise KeyError("mine")
        return g, None


def raises(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.drop(torch.tanh(s.norm(s.lin(x))))
    if s.when[0] == ("recompute" if ts.recomputing() else "forward"):
        raise KeyError("mine")
    return Raises.apply(h, s.when)


@cases(["forward", "recompute", "backward"])
def test_exceptions_in_stages(front: str, name: str, tmp_path: Path) -> None:
    """They reach the caller as they are. The next call is as if there had been none."""
    when = ["never"]
    net, plain = net_for(front, raises), net_for(front, raises)
    for layer in (*net.layers, *plain.layers):
        layer.when = when
    run = run_of(front, list(net.layers), start(), tmp_path)
    dict(observed(run, net, Around(), times=1))
    buffers = {key: value.clone() for key, value in net.named_buffers()}
    when[0] = name
    never = front == "Program" and name == "recompute"  # replays are no calls of Python functions
    with contextlib.nullcontext() if never else pytest.raises(KeyError, match="mine"):
        dict(observed(run, net, Around(), times=1))
    assert never or all(p.grad is None for p in net.layers[0].parameters())
    when[0] = "never"
    net.zero_grad()
    for key, value in net.named_buffers():
        value.copy_(buffers[key])
    dict(observed(plain, plain, Around(), times=1))
    wanted = dict(observed(plain, plain, Around()))
    assert_same(dict(observed(run, net, Around())), wanted)


def test_a_first_call_that_raises() -> None:
    for front in ("Chain", "Loop", "Program"):
        net, plain = net_for(front, raises), net_for(front, raises)
        for layer in (*net.layers, *plain.layers):
            layer.when = ["never"]
        net.layers[-1].when = ["forward"]
        run = run_of(front, list(net.layers), start(), budget=1 << 20)
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                run(start())
        net.layers[-1].when = ["never"]
        for buffer, fresh in zip(net.buffers(), plain.buffers(), strict=True):
            buffer.copy_(fresh)
        assert_same(dict(observed(run, net, Around())), dict(observed(plain, plain, Around())))


@cases(["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_registered_between_a_call_and_its_backward(front: str, name: str, tmp_path: Path) -> None:
    """They see each gradient once, and nothing else."""
    hook = {"register_hook": lambda g: g * 0.5, "register_post_accumulate_grad_hook": halve}[name]
    seen = []
    for by in ("plain", front):
        net = net_for(front, drops)
        run = net if by == "plain" else run_of(front, list(net.layers), start(), tmp_path)

        def register(net: Net = net) -> None:
            for layer in layers_of(net):
                getattr(layer.lin.weight, name)(hook)

        seen.append(dict(observed(run, net, Around(between=register))))
    assert_same(seen[1], seen[0])


def weighs(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x * s.norm.weight) * s.norm.running_var)


@cases(["argument", "parameter", "buffer"])
def test_writes_between_a_call_and_its_backward(front: str, name: str, tmp_path: Path) -> None:
    """Plain PyTorch refuses what it has saved; a recompute would read what is there now."""
    for by in ("plain", front):
        net, x = net_for(front, weighs), start()
        loss = loss_of((net if by == "plain" else run_of(front, list(net.layers), x, tmp_path))(x))
        layer = net.layers[0]
        with torch.no_grad():
            {"argument": x, "parameter": layer.lin.weight, "buffer": layer.norm.running_var}[name].add_(1)
        with pytest.raises(RuntimeError):  # a GradientError is one
            loss.backward()


# ---------------------------------------------------------------------------------------------------- backwards


def of_gradients(loss: torch.Tensor, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    g.square().sum().backward()


def of_one_weight(loss: torch.Tensor, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    x.grad, w.grad = torch.autograd.grad(loss, [x, w])


BACKWARDS: dict[str, Callable[..., object]] = {
    "twice": lambda loss, y, x, w: (loss.backward(retain_graph=True), loss.backward()),
    "of_parts": lambda loss, y, x, w: (y[:, 0].sum().backward(retain_graph=True), y[:, 1:].square().sum().backward()),
    "of_gradients": of_gradients,
    "of_the_input": lambda loss, y, x, w: loss.backward(inputs=[x]),
    "of_one_weight": of_one_weight,
    "with_a_hook_and_a_seed": lambda loss, y, x, w: (y.register_hook(torch.sin), y.backward(torch.ones_like(y))),
}
for _front in RECOMPUTING.split():
    REFUSED[_front, "twice"] = REFUSED[_front, "of_parts"] = "was differentiated a second time"
    REFUSED[_front, "of_gradients"] = "was differentiated with create_graph=True"
REFUSED["stream", "of_one_weight"] = "gradients of chosen parameters of streamed blocks"


@cases(BACKWARDS)
def test_backwards(front: str, name: str, tmp_path: Path) -> None:
    seen = []
    with refused(front, name):
        for by in ("plain", front):
            net = net_for(front, BODIES["in_segments"])
            run = net if by == "plain" else run_of(front, list(net.layers), start(), tmp_path)
            torch.manual_seed(2)
            x = start()
            y = run(x)
            BACKWARDS[name](loss_of(y), y, x, net.layers[0].lin.weight)
            seen.append({"x": x.grad, **{key: p.grad for key, p in net.named_parameters()}})
        assert_same(seen[1], seen[0])


# --------------------------------------------------------------------------------- what a call does and leaves


class Counted(TorchDispatchMode):
    """Sees what layers make in each of their runs, replays too: which of it a plan keeps, its seconds say."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.tanh.default, torch.ops.aten.exp.default, torch.ops.aten.sin.default):
            self.made.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("front", FRONTS)
def test_effects_are_had_once_and_layers_run_again(front: str, tmp_path: Path) -> None:
    log: list[int] = []

    def body(s: Any, x: torch.Tensor) -> torch.Tensor:
        if not ts.recomputing():
            log.append(len(x))
        return torch.tanh(s.lin(x)).exp().sin()

    net = net_for(front, body, times=6)
    run = run_of(front, list(net.layers), start(), tmp_path)
    for _ in range(3):
        log.clear()
        loss = loss_of(run(start()))
        with Counted() as counted:
            loss.backward()
        assert log == [4] * 6
    assert counted.made


@pytest.mark.parametrize("ends", ["backward", "dropped"])
@pytest.mark.parametrize("front", FRONTS)
def test_what_a_call_made_is_freed(front: str, ends: str, tmp_path: Path) -> None:
    net = net_for(front, drops)
    run = run_of(front, list(net.layers), start(), tmp_path)
    for _ in range(2):
        loss_of(run(start())).backward()
    with Counted() as counted:
        loss = loss_of(run(start()))
        if ends == "backward":
            loss.backward()
    del loss
    gc.collect()
    assert len(counted.made) >= 3
    assert [one() for one in counted.made] == [None] * len(counted.made)


@pytest.mark.parametrize("front", FRONTS)
def test_two_hundred_layers(front: str, tmp_path: Path) -> None:
    def body(s: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.tanh(s.lin(x))

    seen = []
    for by in ("plain", front):
        net = net_for(front, body, times=200)
        run = net if by == "plain" else run_of(front, list(net.layers), start(), tmp_path, budget=64 << 10)
        seen.append(dict(observed(run, net, Around(), times=1)))
    assert_same(seen[1], seen[0])
