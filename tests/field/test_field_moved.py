"""Moves and conversions of a streamed model that change nothing, as frameworks make them, and those that would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, WIDTH, plain, rows, sgd, streamed, trained
from exact import assert_same
from torch import nn

from tapestream.errors import InputError

pytestmark = pytest.mark.on_cpu("the model is there")


def net() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


STAY: dict[str, Callable[[Any], Any]] = {
    "to('cpu:0')": lambda m: m.to("cpu:0"),
    "to(device)": lambda m: m.to(torch.device("cpu", 0)),
    "to a parameter": lambda m: m.to(next(m.parameters())),
    "to a batch": lambda m: m.to(rows()),
    "device and dtype": lambda m: m.to("cpu:0", torch.float32),
    "by keywords": lambda m: m.to(device="cpu:0", dtype=torch.float32, non_blocking=True),
    "cpu()": lambda m: m.cpu(),
    "float()": lambda m: m.float(),
    "a part": lambda m: m[1].to("cpu:0"),
    "in the middle of accumulation": lambda m: m.to("cpu:0").train(),
}


@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("how", STAY)
def test_what_moves_nothing(how: str, home: str, tmp_path: Path) -> None:
    expected = plain(net)
    with streamed(net, home, tmp_path, AMPLE) as model:
        assert_same(expected, trained(model, sgd(model), before=lambda m, o, k: STAY[how](m) and None))


@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("how", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m[0].to("meta"),
                                 lambda m: m.to_empty(device="cpu")])  # fmt: skip
def test_what_would_is_refused_and_changes_nothing(how: Callable[[Any], Any], home: str, tmp_path: Path) -> None:
    expected = plain(net)
    with streamed(net, home, tmp_path, AMPLE) as model:
        with pytest.raises(InputError):
            how(model)
        assert_same(expected, trained(model, sgd(model)))
