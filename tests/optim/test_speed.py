"""Plans know how long updates take: tried where speeds are measured, and not where they are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streamable import WIDTH, Chained, Model, dense, numbers
from streaming import loss_at, streamed
from torch import nn

import tapestream as ts
from tapestream.optim.speed import bytes_per_second

CPU = torch.device("cpu")
CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
RATE = {"lr": 0.1}


class Clock:
    """Stands still but for the steps of optimizers."""

    now = 0.0


class Slow(torch.optim.Adam):
    """Takes two seconds for a step, and five for the first."""

    def step(self, closure: Any = None) -> Any:
        Clock.now += 2 if self.state else 5
        return super().step(closure)


class Matrices(torch.optim.SGD):
    """Takes square matrices alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert all(p.dim() == 2 and p.shape[0] == p.shape[1] for p in group["params"])
        return super().step(closure)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(device: torch.device, run: Callable[[], Any]) -> tuple[float, Any]:
        start = Clock.now
        found = run()
        return Clock.now - start, found

    monkeypatch.setattr("tapestream.optim.speed.timed", timed)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_on_a_tensor_is_timed(make: type[torch.optim.Optimizer]) -> None:
    before = torch.random.get_rng_state()
    found = bytes_per_second(make, RATE, RATE, 2**18, torch.float32, CPU)
    assert found is not None
    assert found > 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.usefixtures("clock")
def test_the_step_that_makes_the_state_does_not_count() -> None:
    step_itself = 4  # Adam's own count, a number
    found = bytes_per_second(Slow, RATE, RATE, 1000, torch.float32, CPU)
    assert found == (3 * 4000 + 2 * (2 * 4000 + step_itself)) / 2


def test_nothing_is_said_of_an_optimizer_that_does_not_take_the_tensor() -> None:
    assert bytes_per_second(Matrices, RATE, RATE, 1000, torch.float32, CPU) is None


def seconds_of_updates(**options: Any) -> list[float]:
    with streamed(CASE, "64MiB", device="cpu", **options) as model:
        ts.optimizer(model, Slow, lr=0.1)
        loss_at(model, CASE).backward()
        return [block.update_seconds for block in ts.report(model).plan.profile.blocks]


@pytest.mark.usefixtures("clock")
def test_measured_where_links_are_measured(tmp_path: Path) -> None:
    found = seconds_of_updates(home="disk", folder=tmp_path)
    assert min(found) > 1.9  # of a block little larger than its largest parameter; five billion bytes a second are not


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("home", ["device", "disk"])
def test_not_tried_where_nothing_moves_or_speeds_are_given(home: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    if home == "disk":
        given = {"machine": ts.measure_machine("cpu", tmp_path), "folder": tmp_path}
    assert max(seconds_of_updates(home=home, **given)) < 1e-3
