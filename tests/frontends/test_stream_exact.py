"""Streamed training gives the bits of plain PyTorch: models, engines, homes, budgets, update modes and planners."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import seed
from streamable import MODELS, Model
from streaming import ENGINES, LEVELS, assert_exact, budget_at, loss_at, options_of, streamed

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
    if micro > 1 and home == "device":  # there the gradients of the first lie beside the second
        budget = gathering_budget(case, budget, options)
    assert_exact(case, budget, update=update, micro_batches=micro, **options)


def gathering_budget(case: Model, budget: int, options: dict[str, Any]) -> int:
    """``budget``, or what a second micro-batch needs."""
    with streamed(case, budget, **options) as model:
        ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, master=None)
        seed(3)
        loss_at(model, case).backward()
        try:
            loss_at(model, case)
        except ts.BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            return error.least_nbytes
    return budget


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_every_model_under_the_least_budget(number: int, name: str, tmp_path: Path) -> None:
    check(name, "adversarial", "disk", "least", ("step", "backward")[number % 2], tmp_path)


@pytest.mark.thinned(4)
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
