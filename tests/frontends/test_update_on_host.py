"""Blocks that are updated in RAM below a GPU: the bits of torch's optimizer on the CPU, and nobody sees half a step."""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from on_cpu import OnCpu, names_inside
from place import DEVICE
from streamable import MODELS
from streaming import TWO_HOPS, D, H, budget_at, everything, streamed, train
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], bool]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, True),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, True),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, False),  # torch's fused one fails where some have no buffer
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, False),
}
SETTINGS = [
    (*which, ("least", "ample")[number % 2])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "engine": "fake_streams" if DEVICE == "cpu" else "auto", "home": "host", "machine": TWO_HOPS,
}  # fmt: skip


def maker(name: str, update: str, **more: Any) -> Callable[[Any], Any]:
    make, knobs, _ = OPTIMIZERS[name]
    return lambda model: ts.optimizer(model, make, update=update, where="host", **knobs, **more)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "level"), SETTINGS)
def test_training_has_the_bits_of_the_optimizer_on_the_cpu(
    name: str, optimizer: str, update: str, level: str
) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS[optimizer]
    budget = budget_at("least", case, maker(optimizer, update), **OPTIONS) * (2 + (level == "ample")) // 2
    if name == "dropping":
        torch.manual_seed(0)
    with streamed(case, budget, **OPTIONS) as model:
        found = train(model, maker(optimizer, update)(model), case, gradients=update == "step")
        inside = names_inside(model)
    if name == "dropping":
        torch.manual_seed(0)
    plain = case.model().to(DEVICE)
    expected = train(plain, OnCpu(plain, inside, make, fused, **knobs), case, gradients=update == "step")  # type: ignore[arg-type]
    assert_same(expected, {key: value for key, value in found.items() if not key.startswith("state ")})
