"""Every wait for updates in RAM is needed: without it, some small run sees half of one."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("slow copies are those of the simulated GPU", allow_module_level=True)

from hazards_of_waits import SLOW
from scenarios import MACHINE, TRAINING, batch, network
from simulated_gpu import Simulator
from torch import Tensor, nn
from waits import Wait, every_wait, is_for_updates, without

import tapestream as ts
from tapestream.frontends.module.stream import handle_of
from tapestream.optim.rule import Rule

Training = tuple[nn.Module, Any]
Run = Callable[[Training], list[Tensor]]


@pytest.fixture(autouse=True)
def _slow_updates(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Updates take a while, in which weights are not numbers."""
    run = Rule.run

    def slowly(self: Any, work: Any) -> None:
        run(self, work)  # at once: it must not come before its gradient
        memories = [part.weights for part in work if part.weights is not None]
        if threading.current_thread().name == "tapestream updates":
            after = [memory.clone() for memory in memories]
            for memory in memories:
                memory.fill_(255)
            time.sleep(0.01)
            for memory, made in zip(memories, after, strict=True):
                memory.copy_(made)

    monkeypatch.setattr(Rule, "run", slowly)


def training(update: str = "step", frozen: bool = False, folder: str | None = None) -> Training:
    model = network().to("cpu")
    for p in model.blocks[1].parameters() if frozen else ():
        p.requires_grad_(False)
    home = "host" if folder is None else "disk"
    model = ts.stream(model, device="cuda", home=home, budget=TRAINING, machine=MACHINE, folder=folder)
    return model, ts.optimizer(model, torch.optim.AdamW, lr=1e-2, update=update, master=None, where="host")


def step(one: Training) -> None:
    model, optimizer = one
    model(batch("cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def looked_at_after_a_backward() -> list[Tensor]:
    one = training("backward")
    step(one)
    one[0](batch("cuda")).square().mean().backward()
    found = weights(one[0])
    one[1].step()
    return found


def evaluated() -> list[Tensor]:
    model, _ = one = training()
    step(one)
    step(one)
    with torch.no_grad():
        return [model(batch("cuda")).cpu()]


def state_looked_at() -> list[Tensor]:
    one = training()
    step(one)
    step(one)
    return [value.cpu().clone() for entry in one[1].state.values() for value in entry.values()]


def undone() -> list[Tensor]:
    one = training()
    step(one)
    step(one)
    return weights(ts.unstream(one[0]))


def thawed() -> list[Tensor]:
    one = training(frozen=True)
    step(one)
    for p in one[0].parameters():
        p.requires_grad_(True)
    step(one)
    return weights(one[0])


def two_rates() -> list[Tensor]:
    model, optimizer = one = training()
    step(one)
    model(batch("cuda")).square().mean().backward()
    for rate in (0.5, 0.001):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return weights(model)


def another_optimizer() -> list[Tensor]:
    model, _ = one = training()
    step(one)
    for _ in range(2):
        step((model, ts.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, master=None, where="host")))
    return weights(model)


def held_before() -> list[Tensor]:
    model, optimizer = one = training()
    step(one)
    model(batch("cuda")).square().mean().backward()
    held = [p.detach() for p in model.parameters()]
    optimizer.step()
    return [one.cpu().clone() for one in held]


def saved() -> list[Tensor]:
    one = training()
    step(one)
    step(one)
    found = one[1].state_dict()["state"]
    return [value.cpu().clone() for entry in found.values() for value in entry.values()]


def from_disk() -> list[Tensor]:
    found = []
    for update in ("step", "backward"):
        with TemporaryDirectory() as folder:
            model, _ = one = training(update, folder=folder)
            step(one)
            step(one)
            found += weights(model)
            ts.unstream(model)
    return found


def from_disk_without_a_plan() -> list[Tensor]:
    """Blocks that no plan has updated: gradients are made by hand."""
    with TemporaryDirectory() as folder:
        model, optimizer = training(folder=folder)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        ts.unstream(model)
        return found


def from_disk_and_interrupted() -> list[Tensor]:
    """A backward that fails while blocks are updated: they are updated whole."""
    with TemporaryDirectory() as folder:
        model, _ = training("backward", folder=folder)

        def fail(*_: Any) -> None:
            raise RuntimeError("now")

        hook = model.blocks[0].register_full_backward_hook(fail)  # type: ignore[union-attr, index]
        with contextlib.suppress(RuntimeError):
            model(batch("cuda")).square().mean().backward()
        hook.remove()
        found = weights(model)
        ts.unstream(model)
        return found


RUNS = (from_disk, from_disk_without_a_plan, from_disk_and_interrupted, looked_at_after_a_backward, evaluated,
        state_looked_at, undone, thawed, two_rates, another_optimizer, held_before, saved)  # fmt: skip
ALL = tuple(filter(is_for_updates, every_wait()))
# Ranks come to the first, for blocks that they leave out. Of the second nothing is seen: what it waits for is a
# gradient whose memory nobody takes before the copies that follow, which wait too.
_UNSEEN = ("Updates.now", "BlockCopies._taken_home")
WAITS = tuple(wait for wait in ALL if wait.function not in _UNSEEN)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    return {run.__name__: run() for run in RUNS}


def goes_wrong(run: Callable[[], list[Tensor]], expected: list[Tensor]) -> bool:
    try:
        found = run()
    except Exception:
        return True
    return not all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_something_goes_wrong_without(wait: Wait, expected: dict[str, list[Tensor]], simulator: Simulator) -> None:
    with simulator.knobs(**SLOW), without(wait):
        assert any(goes_wrong(run, expected[run.__name__]) for run in RUNS), f"nobody needs {wait} (line {wait.line})"


def test_nothing_goes_wrong_with_all_of_them(expected: dict[str, list[Tensor]], simulator: Simulator) -> None:
    with simulator.knobs(**SLOW):
        assert not [run.__name__ for run in RUNS if goes_wrong(run, expected[run.__name__])]


def test_updates_are_slow() -> None:
    model, optimizer = training()
    step((model, optimizer))
    assert len(handle_of(model).store.copies.on_host.under_way) > 1
