"""With ``update="backward"`` gradients outside the blocks must be zeroed after each step: blocks keep none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.models import GPT, GPTConfig


def _made(folder: Path) -> tuple[nn.Module, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, width=32, heads=2, vocabulary=64, context=16))
    model = ts.stream(model, device="cpu", budget="8MiB", home="disk", folder=folder)
    rule = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update="backward")
    return model, rule, torch.randint(64, (2, 16)), torch.randint(64, (2, 16))


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_without_zero_grad_is_refused_at_the_next_forward(tmp_path: Path, to_none: bool) -> None:
    model, rule, tokens, targets = _made(tmp_path)
    model(tokens, targets).backward()
    rule.step()
    with torch.no_grad():
        model(tokens, targets)  # evaluation between is no matter
    with pytest.raises(GradientError, match=r"without zero_grad\(\)"):
        model(tokens, targets)
    rule.zero_grad(set_to_none=to_none)
    model(tokens, targets).backward()
    rule.step()
    ts.unstream(model)


def test_a_state_loaded_over_updates_leaves_no_step_to_take(tmp_path: Path) -> None:
    model, rule, tokens, targets = _made(tmp_path / "home")
    ts.save(tmp_path / "saves", model=model, optimizer=rule)
    model(tokens, targets).backward()
    ts.load(tmp_path / "saves", model=model, optimizer=rule)
    with pytest.raises(GradientError, match="loaded over the updates of the last backward"):
        rule.step()
    with pytest.raises(GradientError, match=r"without zero_grad\(\)"):
        model(tokens, targets)
    rule.zero_grad()
    model(tokens, targets).backward()
    rule.step()
    again, other, _, _ = _made(tmp_path / "other")
    again(tokens, targets).backward()
    other.step()
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    ts.unstream(model)
    ts.unstream(again)


@pytest.mark.parametrize("given", ["adam", torch.optim.SGD([torch.zeros(1)], lr=1e-3)])
def test_what_is_no_class_of_optimizers_is_refused_by_name(given: object) -> None:
    model = ts.stream(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), device="cpu", budget="1MiB", home="device")
    with pytest.raises(InputError, match="give the class, such as"):
        ts.optimizer(model, given)  # type: ignore[arg-type]
