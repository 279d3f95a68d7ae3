"""A home for each kind of block value: the bits of plain PyTorch, and each kind where it was asked to be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import CASE, sgd
from streamable import MODELS
from streaming import TWO_HOPS, assert_exact, budget_at, loss_at, streamed

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module.homes.home import tiers_for
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import KINDS

HOMES = [
    ts.Home(parameters="host", gradients="host", optimizer_state="disk"),
    ts.Home(parameters="host", gradients="disk", optimizer_state="disk"),
    ts.Home(parameters="disk", gradients="host", optimizer_state="host"),
    ts.Home(parameters="disk", gradients="disk", optimizer_state="host"),
]


def options(home: ts.Home, folder: Path) -> dict[str, Any]:
    return {"device": "cpu", "engine": "fake_streams", "home": home, "machine": TWO_HOPS, "folder": folder}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("level", ["least", "half"])
def test_training_is_exact(home: ts.Home, update: str, level: str, tmp_path: Path) -> None:
    how = options(home, tmp_path)
    case = MODELS["gpt"]
    knobs = {"lr": 0.01}

    def make(model: Any) -> Any:
        return ts.optimizer(model, torch.optim.AdamW, update=update, master=None, **knobs)

    budget = budget_at(level, case, make, **how)
    assert_exact(case, budget, make=torch.optim.AdamW, knobs=knobs, update=update, **how)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("name", ["frozen_some", "tied", "repeated"])
def test_gradients_of_several_micro_batches_are_exact(home: ts.Home, name: str, tmp_path: Path) -> None:
    how = options(home, tmp_path)
    case = MODELS[name]
    assert_exact(case, budget_at("least", case, sgd, **how), micro_batches=2, **how)


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_every_kind_is_where_it_was_asked_to_be(home: ts.Home, tmp_path: Path) -> None:
    how = options(home, tmp_path)
    with streamed(CASE, budget_at("least", CASE, sgd, **how), **how) as model:
        optimizer = sgd(model)
        loss_at(model, CASE).backward()
        optimizer.step()
        found = {(v.kind, tier) for v, tier in handle_of(model).store.copies.regions if tier is not Tier.DEVICE}
    asked = {
        Kind.PARAMETERS: home.parameters,
        Kind.GRADIENT: home.gradients,
        Kind.OPTIMIZER_STATE: home.optimizer_state,
    }
    assert found <= {(kind, Tier[name.upper()]) for kind, name in asked.items()}
    assert {kind for kind, _ in found} >= {Kind.PARAMETERS, Kind.OPTIMIZER_STATE}


def test_some_kinds_on_the_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"only some of them are the device \(.*give those kinds the host or the disk"):
        ts.stream(CASE.model(), device="cpu", home=ts.Home(parameters="device"), folder=tmp_path)


def test_auto_is_ram_and_overflows_where_there_is_a_folder(tmp_path: Path) -> None:
    def auto(folder: Path | None, device: str, home: str | ts.Home = "auto") -> tuple[set[Tier], frozenset[Kind]]:
        found = tiers_for(home, folder=folder, device=torch.device(device), engine="auto")
        return {found[kind] for kind in KINDS}, found.overflowing

    assert auto(tmp_path, "cuda") == ({Tier.HOST}, frozenset(KINDS))
    assert auto(None, "cuda") == ({Tier.HOST}, frozenset())
    assert auto(tmp_path, "cpu") == ({Tier.DISK}, frozenset())
    assert auto(None, "cpu") == ({Tier.DEVICE}, frozenset())
    parameters_fixed = ts.Home(parameters="host", optimizer_state="disk")
    assert auto(tmp_path, "cuda", parameters_fixed) == ({Tier.HOST, Tier.DISK}, frozenset({Kind.GRADIENT}))
    assert auto(tmp_path, "cuda", "host") == ({Tier.HOST}, frozenset())
