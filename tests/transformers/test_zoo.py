"""Streamed training of Hugging Face models, unmodified, gives the bits of plain PyTorch."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare import Setting, assert_exact, streamed
from zoo import FAMILIES, loss_of

from tapestream import Tier, report
from tapestream.frontends.module.blocks import find_blocks

FAILS: dict[str, tuple[str, Callable[[Setting], bool]]] = {}
"""What cannot be streamed yet: why, and under which settings; strike a line off when it can."""

# Every pair of values of every two of five fields, in six rows: all zeros, and per field another choice of three
# rows out of five (Kleitman and Spencer, Families of k-independent sets, 1973).
ROWS = tuple(itertools.islice(itertools.combinations(range(1, 6), 3), 0, 10, 2))
PAIRWISE = [Setting(*(number in rows for rows in ROWS)) for number in range(6)]
PRODUCT = [Setting(*values) for values in itertools.product((False, True), repeat=5)]


def cases(settings: list[Setting]) -> list[Any]:
    """Every family under those of the settings that it has."""
    found = []
    for name, family in FAMILIES.items():
        for setting in settings:
            if setting.sdpa and "sdpa" not in family.attentions:
                continue
            reason, fails = FAILS.get(name, ("", lambda _: False))
            # Refused, or stopped by an error: wrong bits (an AssertionError) are never expected.
            errors = (RuntimeError, ValueError, AttributeError)
            marks = [pytest.mark.xfail(reason=reason, strict=True, raises=errors)] if fails(setting) else []
            found.append(pytest.param(name, setting, marks=marks, id=f"{name}-{setting}"))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_are_found(name: str) -> None:
    model = FAMILIES[name].model()
    assert find_blocks(model) == FAMILIES[name].blocks(model)


def test_six_settings_hold_every_pair_of_values() -> None:
    rows = [(s.training, s.bfloat16, s.sdpa, s.tight, s.disk) for s in PAIRWISE]
    for one, other in itertools.combinations(range(5), 2):
        assert len({(row[one], row[other]) for row in rows}) == 4


@pytest.mark.parametrize(("name", "setting"), cases(PAIRWISE))
def test_three_steps_have_the_bits_of_plain_pytorch(name: str, setting: Setting, tmp_path: Path) -> None:
    assert_exact(FAMILIES[name], setting, tmp_path / "home")


def test_a_tight_budget_recomputes_and_moves_every_block(tmp_path: Path) -> None:
    family, setting = FAMILIES["bert"], Setting(training=True, bfloat16=False, sdpa=True, tight=True, disk=True)
    with streamed(family.model(), family, setting, tmp_path / "home") as (model, optimizer):
        loss_of(model, family.batch()).backward()
        optimizer.step()
        found = report(model)
        there = sum(p.nbytes for block in family.blocks(model) for p in block.parameters())
    assert found.plan.simulation.forwards > found.plan.simulation.recorded  # that is, some block ran more than once
    assert found.bytes_moved[Tier.DISK, Tier.DEVICE] >= 2 * there
    assert found.peak_nbytes[Tier.DEVICE] < 2 * there  # of 4: parameters, gradients, two moments


@pytest.mark.full
@pytest.mark.parametrize(("name", "setting"), cases([s for s in PRODUCT if s not in PAIRWISE]))
def test_every_setting(name: str, setting: Setting, tmp_path: Path) -> None:
    assert_exact(FAMILIES[name], setting, tmp_path / "home")
