"""Several runs in one folder, one after the other and beside each other: each has its own bytes, and leaves nothing."""

import gc
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, WIDTH, plain, rows, sgd, streamed, trained
from exact import assert_same
from streaming import DIRECT
from torch import nn

import tapestream as ts

TIGHT = 2**14


def net() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def test_two_models_at_once(tmp_path: Path) -> None:
    """Steps of one between a forward and its backward of the other."""
    expected = plain(net)
    with streamed(net, "disk", tmp_path, TIGHT) as first, streamed(net, "disk", tmp_path, TIGHT) as second:
        other = sgd(second)

        def step_of_the_other(model: Any, optimizer: Any, step: int) -> None:
            second(rows(step + 9)).square().mean().backward()
            other.step()
            other.zero_grad()

        assert_same(expected, trained(first, sgd(first), before=step_of_the_other))
    assert not any(tmp_path.iterdir())


def test_one_after_the_other(tmp_path: Path) -> None:
    expected = plain(net)
    for _ in range(3):
        with streamed(net, "disk", tmp_path, TIGHT) as model:
            assert_same(expected, trained(model, sgd(model)))
        assert not any(tmp_path.iterdir())


def test_a_model_that_was_dropped_without_a_word(tmp_path: Path) -> None:
    expected = plain(net)
    torch.manual_seed(0)
    dropped: Any = ts.stream(net(), device="cpu", machine=DIRECT, budget=TIGHT, home="disk", folder=tmp_path)
    dropped(rows()).sum().backward()
    del dropped
    gc.collect()
    with streamed(net, "disk", tmp_path, TIGHT) as model:
        assert_same(expected, trained(model, sgd(model)))
    assert not any(tmp_path.iterdir())


def test_a_model_and_a_chain(tmp_path: Path) -> None:
    expected, stages = plain(net), list(net())
    chain = ts.Chain(stages, budget=TIGHT, folder=tmp_path, machine=DIRECT)
    with streamed(net, "disk", tmp_path, TIGHT) as model:
        loss = chain(rows()).sum()
        assert_same(expected, trained(model, sgd(model)))
        loss.backward()
    wanted = nn.Sequential(*stages)
    found = [p.grad for p in wanted.parameters()]
    wanted.zero_grad()
    wanted(rows()).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, wanted.parameters(), strict=True))  # type: ignore[arg-type]


def _train(folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    with streamed(net, "disk", Path(folder), TIGHT) as model:
        optimizer = sgd(model)
        for k in range(3):
            model(rows(k)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            pipe.send([p.detach().clone().tolist() for p in model.parameters()] if k == 2 else k)
            pipe.recv()


@pytest.mark.timeout(120)
def test_a_run_that_is_killed_beside_one_that_goes_on(tmp_path: Path) -> None:
    """And the next run, which clears away what the killed one has left."""
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    child = processes.Process(target=_train, args=(str(tmp_path), there))
    child.start()
    try:
        assert here.recv() == 0
        expected = plain(net)
        with streamed(net, "disk", tmp_path, TIGHT) as model:
            optimizer = sgd(model)

            def killed(m: Any, o: Any, step: int) -> None:
                if step == 1:
                    os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
                    child.join()

            assert_same(expected, trained(model, optimizer, before=killed))
        with streamed(net, "disk", tmp_path, AMPLE) as model:
            assert_same(expected, trained(model, sgd(model)))
    finally:
        child.kill()
        child.join()
