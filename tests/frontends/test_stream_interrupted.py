"""Ctrl-C within a copy of a streamed model: it arrives as itself, and the next step is as if nothing had been."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming import DIRECT
from torch import nn

import tapestream as ts
from tapestream.executor.engines.threads import ThreadsEngine
from tapestream.executor.gradients import GradientBook


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(8)))


@pytest.mark.parametrize("what", ["copy", "wait"])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 12])
def test_ctrl_c_within_a_copy_is_itself_and_leaves_the_next_step_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, count: int
) -> None:
    """When it has begun and is not waited for yet, or is being waited for."""
    x, plain = torch.ones(4, 96), _made()
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model: Any = ts.stream(
        _made(), device="cpu", budget="256KiB", home="disk", folder=tmp_path, engine="threads",
        machine=DIRECT,
    )  # fmt: skip
    for _ in range(2):  # plans
        model(x).square().sum().backward()
        model.zero_grad()
    original, left = getattr(ThreadsEngine, what), [count]

    def interrupted(engine: ThreadsEngine, *args: Any) -> Any:
        found = original(engine, *args) if what == "copy" else None
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return found if what == "copy" else original(engine, *args)

    with monkeypatch.context() as patched:
        patched.setattr(ThreadsEngine, what, interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            model(x).square().sum().backward()
            pytest.fail(f"only {count - left[0]} calls: it was not interrupted")
    model.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
        model.zero_grad()
    ts.unstream(model)


def test_ctrl_c_while_a_step_ends_waits_until_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients would appear after they were zeroed."""
    x, plain = torch.ones(4, 96), _made()
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model: Any = ts.stream(_made(), device="cpu", budget="256KiB", home="disk", folder=tmp_path, machine=DIRECT)
    model(x).square().sum().backward()
    model.zero_grad()
    publish = GradientBook.publish

    def interrupted(gradients: GradientBook) -> None:
        signal.raise_signal(signal.SIGINT)
        publish(gradients)

    loss = model(x).square().sum()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with monkeypatch.context() as patched:
            patched.setattr(GradientBook, "publish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
    finally:
        signal.signal(signal.SIGINT, before)
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    ts.unstream(model)
