"""Steps as slow as a delayed writer of states: the run waits for the copies and ends, with autograd's gradient."""

import time

import pytest
import torch

import tapestream as ts
from tapestream.costs import Link, Machine
from tapestream.executor.engines import threads
from tapestream.ir import Tier

LINKS = Machine({(Tier.DEVICE, Tier.DISK): Link(1e9), (Tier.DISK, Tier.DEVICE): Link(1e9)})


class Slow(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return torch.sin(x) + x


@pytest.mark.parametrize("seconds", [0.01, pytest.param(3.0, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("reader", [False, True], ids=["writer", "writer and reader"])
def test_a_step_and_a_writer_of_the_same_seconds_do_not_block_each_other(seconds, reader, tmp_path, monkeypatch):
    at_once, delayed = threads.transfer, []

    def late(source, target, nbytes):
        if target.extent is not None or reader:
            delayed.append(nbytes)
            time.sleep(seconds)
        at_once(source, target, nbytes)

    monkeypatch.setattr(threads, "transfer", late)
    monkeypatch.setattr(threads, "open_queue", lambda: None)
    steps = [Slow(seconds)] * 9
    chain = ts.Chain(steps, folder=tmp_path, machine=LINKS, planner="async_multistage", slots=2, interval=2)
    start = torch.linspace(0.1, 1.0, 1024).requires_grad_()
    (found,) = torch.autograd.grad(chain(start).sum(), start)
    assert delayed
    expected = start
    for _ in steps:
        expected = torch.sin(expected) + expected
    assert torch.equal(found, torch.autograd.grad(expected.sum(), start)[0])


def test_the_adversarial_engine_copies_only_at_the_wait(tmp_path):
    chain = ts.Chain(
        [Slow(0.0)] * 9, folder=tmp_path, machine=LINKS, planner="async_multistage", slots=2, interval=1,
        engine="adversarial",
    )  # fmt: skip
    start = torch.linspace(0.1, 1.0, 1024).requires_grad_()
    (found,) = torch.autograd.grad(chain(start).sum(), start)
    expected = start
    for _ in range(9):
        expected = torch.sin(expected) + expected
    assert torch.equal(found, torch.autograd.grad(expected.sum(), start)[0])
