"""Three AdamW steps of a model, by plain PyTorch and streamed, and every bit that they leave behind."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exact import Trace, assert_same, copy_of, seed
from place import DEVICE
from streaming import DIRECT, TWO_HOPS, everything, state_of
from zoo import Batch, Family, loss_of

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.report import Report

KNOBS = {"lr": 0.01, "weight_decay": 0.1}
Loss = Callable[[Any, Batch], torch.Tensor]
Blocks = Callable[[Any], list[torch.nn.Module]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of two values per field; ``tight``: the least budget that works (else everything fits)."""

    training: bool
    bfloat16: bool
    sdpa: bool
    tight: bool
    disk: bool

    @property
    def attention(self) -> str:
        return "sdpa" if self.sdpa else "eager"

    def __str__(self) -> str:
        words = (
            "train" if self.training else "eval", "bfloat16" if self.bfloat16 else "float32", self.attention,
            "tight" if self.tight else "ample", "disk" if self.disk else "device",
        )  # fmt: skip
        return "-".join(words)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(DEVICE, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()


MACHINE = DIRECT if DEVICE == "cpu" else TWO_HOPS
TIGHT = Setting(training=True, bfloat16=False, sdpa=True, tight=True, disk=True)
AMPLE = Setting(training=True, bfloat16=False, sdpa=True, tight=False, disk=False)


def train(model: Any, optimizer: Any, family: Family, setting: Setting, loss_of: Loss = loss_of) -> Trace:
    """Losses, gradients, weights, optimizer state and random state of three steps, by name."""
    seed(3)
    trace: Trace = {}
    for step in range(3):
        with setting.casting():
            loss = loss_of(model, family.batch(step))
        loss.backward()
        trace[f"{step} loss"] = copy_of(loss)
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        trace |= everything(model, f"{step} after ")
    return trace | {"torch": torch.get_rng_state()} | state_of(optimizer)


def adamw(model: Any) -> Any:
    """AdamW for a streamed model."""
    return ts.optimizer(model, torch.optim.AdamW, master=None, **KNOBS)


@contextlib.contextmanager
def streamed(
    model: Any, family: Family, setting: Setting, folder: Path, loss_of: Loss = loss_of, blocks: Any = None
) -> Iterator[tuple[Any, Any]]:
    """``model`` streamed with this setting's home and budget, and its optimizer; undone at the end."""
    home: dict[str, Any] = {"home": "disk", "folder": folder} if setting.disk else {"home": "device"}
    ts.stream(model, device=DEVICE, machine=MACHINE, budget=1 if setting.tight else "1 TiB", blocks=blocks, **home)
    try:
        optimizer = adamw(model)
        if setting.tight:
            tighten(model, lambda: call(model, family, setting, loss_of))
        yield model, optimizer
    finally:
        ts.unstream(model)
        assert not setting.disk or not any(folder.iterdir())


def call(model: Any, family: Family, setting: Setting, loss_of: Loss) -> None:
    with setting.casting():
        loss_of(model, family.batch())


def tighten(model: Any, run: Callable[[], object]) -> None:
    """Give ``model`` the least budget under which ``run`` works, named by the error of one byte."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for number in range(4):  # layers that are dropped at random may all be dropped in one of them
        seed(number)
        try:
            run()
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            handle_of(model).budget = ts.Budget(error.least_nbytes)
            run()
    for buffer, before in buffers:
        buffer.copy_(before)


def assert_worked(done: Report, setting: Setting) -> None:
    """Some block ran more than once, and every block's parameters came from the disk, if that is home, in all of three
    steps. Every chain of two blocks has one to recompute; whether that is worth it depends on the other chains."""
    plans = [plan.simulation for plan in done.plans]
    # Elsewhere small tensors take as much as larger ones, and dropping them saves nothing. At home on the device, an
    # update with masters may take more than the tape.
    if DEVICE == "cpu" and (setting.disk or not setting.bfloat16):
        assert sum(plan.forwards for plan in plans) > sum(plan.recorded for plan in plans)
    if setting.disk:
        there = sum(block.parameters_nbytes for plan in done.plans for block in plan.profile.blocks)
        assert sum(n for (source, _), n in done.bytes_moved.items() if source is ts.Tier.DISK) >= 3 * there > 0


def assert_exact(
    family: Family,
    setting: Setting,
    folder: Path,
    loss_of: Loss = loss_of,
    blocks: Blocks | None = None,
    *,
    near: bool = False,
) -> None:
    """Train both and compare. ``blocks`` finds the blocks of a model; None: those that `stream` finds. ``near``: the
    first gradients are compared within rounding, and nothing after them."""
    theirs = family.model(setting.attention).train(setting.training)
    ours = copy.deepcopy(theirs)
    trainable = [p for p in theirs.parameters() if p.requires_grad]
    expected = train(theirs, torch.optim.AdamW(trainable, **KNOBS), family, setting, loss_of)
    named = None if blocks is None else blocks(ours)
    with streamed(ours, family, setting, folder, loss_of, named) as (model, optimizer):
        if setting.tight:
            ts.report(model)  # its sums begin here
        found = train(model, optimizer, family, setting, loss_of)
        done = ts.report(model)
        assert done.plan.peak_nbytes <= handle_of(model).budget.device_nbytes
        if setting.tight:
            assert_worked(done, setting)
    if near:
        first = [name for name in expected if name.startswith("0 gradient")]
        assert torch.equal(expected["0 loss"], found["0 loss"])
        for name in first:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    else:
        assert_same(expected, found)
