"""Micro-batches that pass the blocks together on a real device: the bits of plain PyTorch there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accumulating import always_faster, mean_loss, one_by_one, prepared, said
from exact import assert_same, seed
from streamable import MODELS, Model
from streaming import everything, gradients_of, options_of
from torch import nn

import tapestream as ts


def trained(model: nn.Module, optimizer: Any, case: Model, accumulate: Callable[..., Any], update: str) -> Any:
    seed(3)
    trace = {}
    for step in range(3):
        given = [tuple(t.cuda() for t in case.batch()) for _ in range(3)]
        with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
            losses = accumulate(model, given, mean_loss)
        trace |= {f"{step}.{k} loss": loss.cpu() for k, loss in enumerate(losses)}
        trace |= {f"{step} {n}": g for n, g in gradients_of(model).items()} if update == "step" else {}
        optimizer.step()
        optimizer.zero_grad()
    return trace | everything(model) | {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["gpt", "gpt_autocast", "masked", "adapters", "two_chains"])
def test_micro_batches_together(name: str, home: str, update: str, tmp_path: Path) -> None:
    case = MODELS[name]
    plain, model = (
        case.model().cuda(),
        ts.stream(case.model(), budget="256 MiB", **options_of("cuda", tmp_path, home, "cuda")),
    )
    weights = [p for p in plain.parameters() if p.requires_grad]
    wanted = trained(plain, torch.optim.SGD(weights, lr=0.05, momentum=0.9), case, one_by_one, update)
    with always_faster():
        found = trained(model, prepared(model, update), case, ts.accumulate, update)
    order = said(model)
    ts.unstream(model)
    assert_same(wanted, found)
    assert order.startswith("3 micro-batches together, block by block")
