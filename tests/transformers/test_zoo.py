"""Streamed training of Hugging Face models, unmodified, gives the bits of plain PyTorch."""

import itertools
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from compare import Setting, assert_exact, streamed
from zoo import FAMILIES, Family, loss_of

from tapestream import Tier, report
from tapestream.frontends.module.blocks import find_blocks

FAILS: dict[str, tuple[str, Callable[[Setting], bool]]] = {}
"""What cannot be streamed yet: why, and under which settings; strike a line off when it can."""

# Every pair of values of every two fields, in six rows. The first two recompute and stream parameters from disk; and so
# do three more, in eval mode and with eager attention in fp32.
ROWS = ((1, 0, 1, 1, 1), (1, 1, 0, 1, 1), (0, 0, 0, 0, 0), (1, 1, 1, 0, 0), (0, 1, 1, 1, 0), (0, 1, 1, 0, 1))
ROWS += ((0, 0, 1, 1, 1), (0, 1, 0, 1, 1), (1, 0, 0, 1, 1))
PAIRWISE = [Setting(*map(bool, row)) for row in ROWS]
PRODUCT = [Setting(*values) for values in itertools.product((False, True), repeat=5)]


def settings_of(family: Family, settings: list[Setting]) -> list[Setting]:
    """The settings, each once, with eager attention where the family has no other."""
    return list(dict.fromkeys(replace(s, sdpa=s.sdpa and "sdpa" in family.attentions) for s in settings))


def cases(*, full: bool = False) -> list[Any]:
    """Every family under these settings, or under all others."""
    found = []
    for name, family in FAMILIES.items():
        few = settings_of(family, PAIRWISE)
        rest = [s for s in settings_of(family, PRODUCT) if s not in few]
        more = [s for s in few if s not in settings_of(family, PAIRWISE[:6])]
        for setting in rest if full else few:
            reason, fails = FAILS.get(name, ("", lambda _: False))
            # Refused, or stopped by an error: wrong bits (an AssertionError) are never expected.
            errors = (RuntimeError, ValueError, AttributeError)
            marks = [pytest.mark.xfail(reason=reason, strict=True, raises=errors)] if fails(setting) else []
            marks += [pytest.mark.full] if setting in more and not full else []
            found.append(pytest.param(name, setting, marks=marks, id=f"{name}-{setting}"))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_are_found(name: str) -> None:
    model = FAMILIES[name].model()
    assert find_blocks(model) == FAMILIES[name].blocks(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_settings_hold_every_pair_of_values(name: str) -> None:
    """Those of the families without a choice of attention, too; and every family trains tight, from disk, in fp32."""
    settings = settings_of(FAMILIES[name], PAIRWISE)
    choices = [fields for fields in zip(*map(astuple, settings), strict=True) if len(set(fields)) == 2]
    assert len(choices) == 3 + len(FAMILIES[name].attentions)
    for one, other in itertools.combinations(choices, 2):
        assert len(set(zip(one, other, strict=True))) == 4
    assert any(s.training and s.tight and s.disk and not s.bfloat16 for s in settings)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "setting"), cases())
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
@pytest.mark.parametrize(("name", "setting"), cases(full=True))
def test_every_setting(name: str, setting: Setting, tmp_path: Path) -> None:
    assert_exact(FAMILIES[name], setting, tmp_path / "home")
