"""The silent failures of `test_silent_failures.py` where the tape moves to a disk and back: states and saved tensors of
a `Chain`, restart checkpoints of a `Loop`, both of a `Program`. (What a streamed model moves is moved there.)

Copies of the adversarial engine happen when they are waited for, and what is not there is poisoned.
"""

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
from hazard_calls import Call, Repeated, assert_same, plainly, steps
from hazards import KINDS, TOGETHER, Net, net_of
from thinned import one_in
from tiered import DEVICE, DISK, DISKS, saved_away

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.program.sizes import Sizes
from tapestream.planning.plan import Plan

STAYS = {
    "chain, offload": (),
    "chain, saved tensors": ("frozen", "frozen first", "a skip"),
    "loop, async_multistage": (),
    "program, offload": ("frozen first",),
    "program, joint": (
        "frozen",
        "frozen first",
        "its state on the context",
        "its result on the context",
        "numpy's pairs of numbers",
        "tied weights",
    ),
    "program, superneurons": ("autocast", "frozen", "frozen first", "its state on the context", "a skip"),
}
"""By front-end and planner: networks of which these move nothing, for there is nothing, or it would not help."""
CASES = [
    (kind, way, engine)
    for kind in KINDS
    for way, stays in STAYS.items()
    for engine in ("adversarial", "threads")
    if kind not in stays and (engine == "adversarial" or kind.endswith("on the context"))
]
BATCHES = 4  # a program moves from its second call on
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on measured seconds."""
    monkeypatch.setattr(Sizes, "seconds", lambda sizes: numpy.full(len(sizes.record), 1e-3))


def kept_whole(kind: str, call: Any, net: Net) -> Plan:
    """The plan of a call that keeps all it saves."""
    steps(call, net, batches=2)
    assert call.plan is not None
    return call.plan  # type: ignore[no-any-return]


def moved(net: Net, kind: str, way: str, options: dict[str, Any]) -> Any:
    """``net`` by one of the ways in STAYS."""
    (frontend, planner), twin = way.split(", "), copy.deepcopy(net)
    if planner == "offload" and frontend == "chain":
        return ts.Chain(list(net.blocks), planner=planner, tail=2, ahead=1, **options)
    if frontend == "chain":
        whole = kept_whole(kind, ts.Chain(list(twin.blocks), planner="store_all"), twin)
        schedule = saved_away(whole.schedule.stages, DISK)
        return ts.Chain(list(net.blocks), plan=Plan.judged(schedule, whole.profile, ts.Budget(), DISKS), **options)
    if frontend == "loop":
        interval = 1 if kind in TOGETHER else 2
        return Repeated(net, kind, planner=planner, slots=1, interval=interval, **options)
    whole = kept_whole(kind, ts.Program(twin, budget="1GiB", planner="store_all"), twin)
    with pytest.raises(BudgetError) as refused:
        steps(ts.Program(twin, budget=1), twin)
    budget = max(whole.peak_nbytes // 2, (refused.value.least_nbytes or 0) * 5 // 4)
    return ts.Program(net, budget=budget, planner=planner, **options)


def assert_moved(call: Any) -> None:
    """Something went away and came back."""
    if isinstance(call, Repeated):
        assert call.loop.plan is not None
        lanes = call.loop.plan.simulation.bytes_moved
    else:
        lanes = call.copies.bytes_moved
    assert lanes[DEVICE, DISK] > 0
    assert lanes[DISK, DEVICE] > 0


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("kind", "way", "engine"), one_in(2, CASES))
def test_values_gradients_and_buffers_are_plain_pytorchs(kind: str, way: str, engine: str, tmp_path: Path) -> None:
    theirs, ours = net_of(kind), net_of(kind)
    expected = steps(plainly(theirs, kind, way), theirs, batches=BATCHES)
    call: Call = moved(ours, kind, way, {"folder": tmp_path, "engine": engine, "machine": DISKS})
    assert_same(expected, steps(call, ours, batches=BATCHES))
    assert_moved(call)
