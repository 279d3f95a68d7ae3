"""Restart checkpoints of a Loop on a disk."""

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from looping import KINDS, Ticks, assert_equal, differentiated

import tapestream as ts
from tapestream.errors import StorageError
from tapestream.storage.pool import Pool

LINK = ts.Link(1e9)
MACHINE = ts.Machine({(ts.Tier.DEVICE, ts.Tier.DISK): LINK, (ts.Tier.DISK, ts.Tier.DEVICE): LINK})


@pytest.mark.parametrize("engine", ["adversarial", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_a_plain_loop(kind, engine, tmp_path):
    options = {"planner": "async_multistage", "slots": 2, "interval": 4, "folder": tmp_path, "engine": engine}
    expected, _ = differentiated(kind, 27, None)
    found, run = differentiated(kind, 27, options | {"machine": MACHINE})
    assert_equal(found, expected)
    assert run.plan.simulation.bytes_moved[ts.Tier.DEVICE, ts.Tier.DISK] > 0


def test_long_schedules_are_judged_by_short_ones():
    from tapestream.frontends.loop import tier_plans
    from tapestream.frontends.loop.costs import StepCost
    from tapestream.frontends.loop.plans import profile_of

    cost = StepCost(1e-5, 2e-5, 5000, 9000, between_nbytes=5000)
    profile = profile_of(cost, 4321, 1)
    knobs = {"slots": 3, "interval": 40}
    found = tier_plans._away(profile, ts.Budget("1MiB"), MACHINE, knobs).simulation
    whole = ts.simulate(ts.planners["async_multistage"](profile, "1MiB", MACHINE, **knobs), profile, MACHINE)
    assert (found.forwards, found.recorded, found.backwards) == (whole.forwards, whole.recorded, whole.backwards)
    assert found.peak_nbytes == whole.peak_nbytes
    assert found.bytes_moved == whole.bytes_moved
    assert found.makespan_seconds == pytest.approx(whole.makespan_seconds)


def rotated(n_state=1000):
    weight = torch.full((n_state,), 0.9, requires_grad=True)
    return weight, lambda h: torch.sin(torch.roll(h, 1) * weight)


def test_auto_takes_the_disk_where_that_is_faster(tmp_path):
    _weight, step = rotated(100_000)
    run = ts.Loop(step, budget="6MiB", folder=tmp_path, machine=MACHINE)
    run(torch.ones(100_000), steps=300)
    assert run.plan.planner == "async_multistage"
    del run
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, monkeypatch):
    weight, step = rotated()
    ticks = Ticks()
    run = ts.Loop(
        lambda h: ticks.tick() or step(h), planner="async_multistage", slots=2, interval=4, folder=tmp_path,
        machine=MACHINE,
    )  # fmt: skip
    run(torch.ones(1000), steps=100)  # measures the step
    real, before = os.statvfs(tmp_path), weight.detach().clone()
    ran = ticks.number
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 5, *real[5:])))  # five blocks are free
        with pytest.raises(StorageError, match=r"file system, mounted at /.*, \d+ bytes are free, \d+ too few"):
            run(torch.ones(1000), steps=100)
    assert ticks.number - ran < 10  # those that are watched
    assert torch.equal(weight, before)
    assert weight.grad is None
    run(torch.ones(1000), steps=100).sum().backward()


def test_a_full_disk_leaves_the_parameters_alone(tmp_path, monkeypatch):
    weight, step = rotated()
    run = ts.Loop(step, planner="async_multistage", slots=2, interval=4, folder=tmp_path, machine=MACHINE)
    allocate = Pool.allocate

    def full(self, tier, nbytes):
        if tier is ts.Tier.DISK:
            raise StorageError("could not reserve: 0 bytes are free on this disk")
        return allocate(self, tier, nbytes)

    before = weight.detach().clone()
    with monkeypatch.context() as patched:
        patched.setattr(Pool, "allocate", full)
        with pytest.raises(StorageError, match="0 bytes are free"):
            run(torch.ones(1000), steps=100)
    assert torch.equal(weight, before)
    assert weight.grad is None
    run(torch.ones(1000), steps=100).sum().backward()
    assert weight.grad is not None


KILLED = """
import sys, torch, tapestream as ts
weight = torch.full((1000,), 0.9, requires_grad=True)
link = ts.Link(1e9)
machine = ts.Machine({(ts.Tier.DEVICE, ts.Tier.DISK): link, (ts.Tier.DISK, ts.Tier.DEVICE): link})
def step(h, t):
    if t == 60:
        print("there", flush=True)
        sys.stdin.read()
    return torch.sin(h * weight)
options = dict(planner="async_multistage", slots=2, interval=4, folder=sys.argv[1], machine=machine)
ts.Loop(step, **options)(torch.ones(1000), inputs=range(100)).sum().backward()
"""


def test_after_a_kill_the_next_run_works(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    _weight, step = rotated()
    run = ts.Loop(step, planner="async_multistage", slots=2, interval=4, folder=tmp_path, machine=MACHINE)
    assert len(list(tmp_path.iterdir())) == 1  # what the killed one left
    run(torch.ones(1000), steps=100).sum().backward()
    del run
    gc.collect()
    assert not list(tmp_path.iterdir())
