"""A step whose blocks are updated in RAM takes what its plan says: on the virtual clock, with a lane for updates."""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("it is the simulated GPU that has a virtual clock", allow_module_level=True)

from simulated_gpu.clock import CARDS, Card, Clock, Lane
from timelines import HIDDEN, ROWS, SECONDS, WIDE, hidden, machine_of, plan_of, planned, streamed

import tapestream as ts
from tapestream.executor.copies import BlockCopies
from tapestream.executor.engines.cuda import CudaEngine
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Tier, Value


class HostLane:
    """Updates take what the plan says, one after the other, from when their gradient is in RAM; who waits for one waits
    on the clock."""

    def __init__(self, clock: Clock, lane: Lane, seconds: Callable[[int], float]) -> None:
        self._clock, self._lane, self._seconds = clock, lane, seconds
        self._ends: dict[int, float] = {}

    def watch(self, copies: BlockCopies, monkeypatch: pytest.MonkeyPatch) -> None:
        begin, end = copies.on_host.begin, copies.on_host.end

        def begun(block: int, update: Callable[[], None]) -> None:
            gradient = copies.regions.get((Value(Kind.GRADIENT, block), Tier.HOST))
            events = [use.event for use in gradient.uses.values()] if gradient is not None else []  # type: ignore[attr-defined]
            self._works(block, max([self._clock.host(), *map(self._clock.moment, events)]))
            begin(block, update)

        def ended(block: int) -> None:
            if block in self._ends and copies.on_host.uses(block):
                self._clock.wait(self._ends.pop(block))
            end(block)

        monkeypatch.setattr(copies.on_host, "begin", begun)
        monkeypatch.setattr(copies.on_host, "end", ended)
        # The clock is one for all threads: what waits for events on another must not move it.
        monkeypatch.setattr(CudaEngine, "on_host", lambda *_: lambda: None)

    def again(self) -> None:
        """The clock was set: what is under way begins then."""
        under_way, self._ends = list(self._ends), {}
        for block in under_way:
            self._works(block, 0.0)

    def _works(self, block: int, after: float) -> None:
        self._ends[block] = self._lane.work(f"update {block}", seconds=self._seconds(block), after=after)


def trained(
    clock: Clock, card: Card, update: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, float, float, int]:
    """The plan of a step, and what the third one takes: seconds, the hidden part of copies, and their bytes."""
    model = streamed(card, 0.45, machine=replace(machine_of(card), host_updates_per_second=rate))
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=update, master=None, where="host")
    x = torch.ones(ROWS, WIDE, device="cuda")

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    handle, lane = handle_of(model), clock.lane("updates")
    costs = lambda block: plan_of(model).profile.blocks[block].host_update_seconds or 0.0  # noqa: E731
    updates = HostLane(clock, lane, costs)
    step()
    updates.watch(handle.store.copies, monkeypatch)
    step()
    torch.cuda.synchronize()
    gc.collect()
    clock.set(card)
    updates.again()
    step()
    torch.cuda.synchronize()
    copied = [one for one in clock.record() if one.name.startswith("copy")]
    kernels = [(one.start, one.end) for one in clock.record() if not one.name.startswith(("copy", "update"))]
    part = hidden([(one.start, one.end) for one in copied], kernels)
    found = plan_of(model), clock.host(), part, sum(one.nbytes for one in copied)
    optimizer.settle()
    ts.unstream(model)
    return found


@pytest.mark.parametrize("rate", [1e12, 2e9, 5e8])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", CARDS)
def test_a_step_takes_what_its_plan_says(
    clock: Clock, name: str, update: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With updates that cost nothing, some that hide, and some that all wait for."""
    card = replace(CARDS[name], single=CARDS[name].single / 8)
    clock.set(card)
    plan, seconds, part, nbytes = trained(clock, card, update, rate, monkeypatch)
    said = planned(plan)
    assert any(span.lane == "updates on HOST" for span in plan.simulation.timeline.spans)
    assert nbytes == said.nbytes > 0
    assert seconds == pytest.approx(said.seconds, rel=SECONDS)
    assert part == pytest.approx(said.hidden, abs=HIDDEN)
