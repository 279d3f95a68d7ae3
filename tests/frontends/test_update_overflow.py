"""Updates in RAM of blocks of which some lie on the disk as RAM is full: the optimizer's bits on the CPU."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from on_cpu import OnCpu, names_inside
from place import DEVICE
from streamable import MODELS
from streaming import H, K, all_of, budget_at, streamed, train
from test_overflow import WIDE, deep, options, stepped
from test_update_on_host import ADAMW, OPTIMIZERS, maker, under_way

import tapestream as ts
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind

SETTINGS = [
    (*which, (0.5, 0.65, 0.8)[number % 3])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]


@pytest.mark.filterwarnings("ignore:page-locked memory takes")  # gaps: a few pages are much here
@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "share"), SETTINGS)
def test_training_has_the_bits_of_the_optimizer_on_the_cpu_within_ram(
    name: str, optimizer: str, update: str, share: float, tmp_path: Path
) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS[optimizer]
    how = options(tmp_path)
    budget = budget_at("least", case, maker(optimizer, update), **how) * 5 // 4
    host = int(share * 4 * sum(p.nbytes for p in case.model().parameters()))
    for _ in range(12):
        try:
            torch.manual_seed(0)
            with streamed(case, ts.Budget(budget, host=host), **how) as model:
                found = train(model, maker(optimizer, update)(model), case, gradients=update == "step")
                assert handle_of(model).pool.peak_nbytes(H) <= host
                inside = names_inside(model)
            break
        except ts.BudgetError:  # less than what passes through
            host = int(host * 1.3)
    torch.manual_seed(0)
    plain = case.model().to(DEVICE)
    expected = train(plain, OnCpu(plain, inside, make, fused, **knobs), case, gradients=update == "step")  # type: ignore[arg-type]
    assert_same(expected, {key: value for key, value in found.items() if not key.startswith("state ")})


@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_fits_goes_on_and_what_does_not_is_on_the_disk(update: str, tmp_path: Path) -> None:
    model, plain = deep(), deep().to(DEVICE)
    total = sum(p.nbytes for p in model.parameters())
    model = ts.stream(model, budget=ts.Budget(total, host=int(3.8 * total)), **options(tmp_path))
    optimizer = ts.optimizer(model, torch.optim.AdamW, update=update, where="host", **ADAMW)
    reference: Any = OnCpu(plain, names_inside(model), torch.optim.AdamW, True, **ADAMW)
    expected = stepped(plain, reference, 4, 4, 8, 4)
    found = stepped(model, optimizer, 4, 4, 8, 4)
    assert all(map(torch.equal, expected, found))
    copies = handle_of(model).store.copies
    on_disk = {value.index for value, tier in copies.regions if tier is K and value.kind is Kind.OPTIMIZER_STATE}
    assert on_disk
    if update == "step":
        assert len(on_disk) < len(handle_of(model).store.blocks)
        assert 0 < under_way(model) <= len(handle_of(model).store.blocks) - len(on_disk)
    assert_same(all_of(plain), all_of(model))
    assert handle_of(model).pool.peak_nbytes(H) <= int(3.8 * total)
    model(torch.ones(2, WIDE, device=DEVICE))
    ts.unstream(model)
