"""Training twice, by plain PyTorch and by `stream`, and comparing every bit."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from exact import Trace, assert_same, copy_of, seed
from place import DEVICE
from streamable import Model, loss_of
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError

D, H, K = ts.Tier.DEVICE, ts.Tier.HOST, ts.Tier.DISK
DIRECT = ts.Machine(links={(D, K): ts.Link(1e9), (K, D): ts.Link(1e9)})
TWO_HOPS = ts.Machine(links={(H, D): ts.Link(2e9), (D, H): ts.Link(2e9), (K, H): ts.Link(1e9), (H, K): ts.Link(1e9)})
LEVELS = ("full", "half", "least")
ENGINES = ("auto", "adversarial", "fake_streams")

Plain = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes a torch optimizer for a plain model."""


def options_of(engine: str, folder: Path, home: str = "disk", device: str = DEVICE) -> dict[str, Any]:
    """Arguments of `stream`. Speeds are given, so that nothing is measured."""
    machine = TWO_HOPS if engine == "fake_streams" or device == "cuda" else DIRECT
    found: dict[str, Any] = {"device": device, "engine": engine, "home": home, "machine": machine}
    return found | ({"folder": folder} if home == "disk" else {})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Model,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    gradients: bool = True,
    device: str = DEVICE,
) -> Trace:
    """Everything that ``steps`` steps leave behind, by name."""
    seed(3)
    trace: Trace = {}
    for step in range(steps):
        for micro in range(micro_batches):
            loss = loss_at(model, case, device)
            loss.backward()
            trace[f"{step}.{micro} loss"] = copy_of(loss)
        trace |= stepped(model, optimizer, step, gradients=gradients)
    return trace | {"torch": torch.get_rng_state()} | state_of(optimizer)


def stepped(model: nn.Module, optimizer: Any, step: int, *, gradients: bool = True) -> Trace:
    """Step after the backward: the gradients, if they are there still, and everything afterwards."""
    trace: Trace = {}
    if gradients:
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return trace | everything(model, f"{step} after ")


def loss_at(model: nn.Module, case: Model, device: str = DEVICE) -> torch.Tensor:
    """The loss of one fresh batch."""
    batch = tuple(t.to(device) for t in case.batch())
    with torch.autocast(device, torch.bfloat16) if case.autocast else contextlib.nullcontext():
        return loss_of(model(*batch))


def everything(model: nn.Module, prefix: str = "") -> Trace:
    """Copies of what ``state_dict()`` holds."""
    return {prefix + name: copy_of(tensor) for name, tensor in model.state_dict().items()}


def all_of(model: Any) -> Trace:
    """Copies of all parameters and buffers, those that are never saved too, under all their names."""
    parameters = {**dict(model.named_parameters(remove_duplicate=False))}
    return {name: t.detach().cpu().clone() for name, t in (parameters | dict(model.named_buffers())).items()}


def gradients_of(model: nn.Module) -> Trace:
    """Copies of all gradients."""
    return {name: copy_of(p.grad) for name, p in model.named_parameters()}


def state_of(optimizer: torch.optim.Optimizer) -> Trace:
    """Copies of the optimizer's state, by parameter number and name."""
    return {
        f"state {number} {name}": torch.as_tensor(value).cpu().clone()
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
        if value is not None
    }


@contextlib.contextmanager
def streamed(case: Model, budget: int | str | None = None, **options: Any) -> Iterator[nn.Module]:
    """A streamed model, undone at the end: nothing may be left in its folder then."""
    model = ts.stream(case.model(), budget=budget, **options)
    try:
        yield model
    finally:
        ts.unstream(model)
        if "folder" in options:
            assert not any(Path(options["folder"]).iterdir())


def held_below(model: nn.Module) -> int:
    """Bytes of states and saved tensors on disk."""
    below = ts.frontends.module.stream.handle_of(model).homes.states
    below.settle()
    assert below._opened is not None
    return below._opened[0].held_nbytes(K)


def assert_dropped_calls_leave_nothing(model: nn.Module, case: Model) -> None:
    """Calls that nobody differentiates put something on disk, and take it away as they go."""
    for _ in range(3):
        loss = loss_at(model, case)
        assert held_below(model) > 0
        del loss
        gc.collect()
        assert held_below(model) == 0


def budget_at(level: str, case: Model, optimizer: Callable[[nn.Module], Any], **options: Any) -> int:
    """Bytes for one of LEVELS: all that a step takes with everything on the device, halfway to the least, or the
    least that works."""
    with streamed(case, 1, **options) as model:
        optimizer(model)
        least = least_for(model, case, options["device"])
    if level == "least":
        return least
    generous = {k: v for k, v in options.items() if k not in ("home", "folder")}
    with streamed(case, "1 TiB", **generous, home="device") as model:
        optimizer(model)
        seed(3)  # as `train`: what is drawn may decide which layers run
        loss_at(model, case, options["device"]).backward()
        full = ts.report(model).plan.peak_nbytes
    full = max(least, full)  # for two chains, the report shows the first
    return full if level == "full" else (least + full) // 2


def least_for(model: nn.Module, case: Model, device: str = DEVICE) -> int:
    """The budget that the error of far too small a one names."""
    seed(3)
    try:
        loss_at(model, case, device)
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        ts.frontends.module.stream.handle_of(model).budget = ts.Budget(error.least_nbytes)
        seed(3)
        loss_at(model, case, device)
        return error.least_nbytes
    raise AssertionError("a budget of one byte did not raise BudgetError")


def assert_exact(
    case: Model,
    budget: int,
    *,
    make: type[torch.optim.Optimizer] = torch.optim.SGD,
    knobs: dict[str, Any] | None = None,
    update: str = "step",
    micro_batches: int = 1,
    **options: Any,
) -> None:
    """Train by both and compare."""
    knobs = knobs or {"lr": 0.05, "momentum": 0.9}
    device = options["device"]
    plain = case.model().to(device)
    gradients = update == "step"
    trainable = [p for p in plain.parameters() if p.requires_grad]
    expected = train(
        plain, make(trainable, **knobs), case, micro_batches=micro_batches, gradients=gradients, device=device
    )
    with streamed(case, budget, **options) as model:
        optimizer = ts.optimizer(model, make, update=update, master=None, **knobs)
        found = train(model, optimizer, case, micro_batches=micro_batches, gradients=gradients, device=device)
        assert ts.report(model).plan.peak_nbytes <= budget
    assert_same(expected, found)
