"""Micro-batches that go together, of a model whose blocks are updated in RAM while other work goes on."""

from typing import Any

import pytest
import torch
from accumulating import always_faster, said
from on_cpu import OnCpu, names_inside
from test_update_on_host import ADAMW, OPTIONS, Pair, Tower, batch, slowly

import tapestream as ts

__all__ = ["slowly"]  # a fixture


def steps(pair: Pair, *, together: bool) -> list[torch.Tensor]:
    model, optimizer = pair
    found = list[torch.Tensor]()
    for number in range(4):
        some, loss = [batch(10 * number + k) for k in range(3)], lambda out, _: out.square().mean()
        if together:
            found += ts.accumulate(model, some, loss)
        else:
            for one in some:
                value = loss(model(one), one)
                value.backward()
                found.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("budget", ["200 KiB", "2 MiB"])
def test_updates_in_ram_have_the_bits_of_the_optimizer_on_the_cpu(budget: str, update: Any, slowly: None) -> None:
    model = ts.stream(Tower(), budget=budget, **OPTIONS)
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="host", update=update, **ADAMW)
    plain = Tower().to(next(model.parameters()).device)
    wanted = steps((plain, OnCpu(plain, names_inside(model), torch.optim.AdamW, True, **ADAMW)), together=False)
    with always_faster():
        found = steps((model, optimizer), together=True)
    assert "together" in said(model)
    assert all(map(torch.equal, found, wanted))
    ts.unstream(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
