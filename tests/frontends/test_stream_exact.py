"""Streamed training gives the bits of plain PyTorch: models, engines, homes, budgets, update modes and planners."""

import itertools
from pathlib import Path

import pytest
import torch
from streamable import MODELS
from streaming import ENGINES, LEVELS, assert_exact, budget_at, options_of

import tapestream as ts

PLANNERS = ("auto", "store_all", "periodic", "bisection", "revolve", "rotor")
HOMES = {"auto": ("disk", "device"), "adversarial": ("disk",), "fake_streams": ("host", "disk")}
SETTINGS = [(e, h, level, u) for e in ENGINES for h in HOMES[e] for level in LEVELS for u in ("step", "backward")]


def check(
    name: str, engine: str, home: str, level: str, update: str, folder: Path, planner: str = "auto", micro: int = 1
) -> None:
    case, options = MODELS[name], options_of(engine, folder, home) | {"planner": planner}
    budget = budget_at(
        level,
        case,
        lambda m: ts.optimizer(m, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None),
        **options,
    )
    assert_exact(case, budget, update=update, micro_batches=micro, **options)


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_every_model_under_the_least_budget(number: int, name: str, tmp_path: Path) -> None:
    check(name, "adversarial", "disk", "least", ("step", "backward")[number % 2], tmp_path)


@pytest.mark.parametrize(("number", "setting"), list(enumerate(SETTINGS)))
def test_every_setting(number: int, setting: tuple[str, str, str, str], tmp_path: Path) -> None:
    engine, home, level, update = setting
    names = list(MODELS)
    planner = PLANNERS[number % len(PLANNERS)]
    check(
        names[number * 5 % len(names)],
        engine,
        home,
        level,
        update,
        tmp_path,
        planner,
        micro=1 + (update == "step" and number % 4 == 0),
    )


FULL = [(n, *s, p) for n, s, p in itertools.product(MODELS, SETTINGS, PLANNERS)]


@pytest.mark.full
@pytest.mark.parametrize("setting", FULL)
def test_the_whole_product(setting: tuple[str, str, str, str, str, str], tmp_path: Path) -> None:
    name, engine, home, level, update, planner = setting
    check(name, engine, home, level, update, tmp_path, planner, micro=1 + (update == "step"))
