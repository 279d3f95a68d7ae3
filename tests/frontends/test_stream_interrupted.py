"""Ctrl-C anywhere in a step of a streamed model: it arrives as itself, and the next step is as if nothing had been."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(8)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moment", range(12))
def test_ctrl_c_within_a_step_is_itself_and_leaves_the_next_one_right(tmp_path: Path, alarm: None, moment: int) -> None:
    x, plain = torch.ones(4, 96), _made()
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model: Any = ts.stream(_made(), device="cpu", budget="256KiB", home="disk", folder=tmp_path)
    model(x).square().sum().backward()  # plans
    model.zero_grad()
    for part in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0007 * (3 * moment + part))
        try:
            for _ in range(100):
                model(x).square().sum().backward()
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("it was never interrupted")
        model.zero_grad()
        model(x).square().sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
        model.zero_grad()
    ts.unstream(model)
