"""Embeddings and heads of Hugging Face models come and go like blocks, tied or not, and every bit stays the same."""

from pathlib import Path
from typing import Any

import pytest
from compare import TIGHT, Setting, assert_exact
from zoo import FAMILIES

from tapestream.frontends.module.blocks import find_blocks
from tapestream.frontends.module.homes import wide

CASTING = Setting(training=True, bfloat16=True, sdpa=False, tight=True, disk=True)
# One weight for embedding and head, two, one for three uses, one with a bias that its parent holds too.
CHOSEN = ("gpt2", "llama", "t5", "bert")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [n if n in CHOSEN else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
@pytest.mark.parametrize("setting", [TIGHT, pytest.param(CASTING, marks=pytest.mark.full)], ids=str)
def test_three_steps_have_the_bits_of_plain_pytorch(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(wide, "_LEAST_NBYTES", 1)  # small models have small embeddings
    monkeypatch.setattr(wide, "_SHARE", 1000)
    family = FAMILIES[name]
    model = family.model()
    assert bool(wide.wide_modules(model, find_blocks(model))) or name not in CHOSEN
    assert_exact(family, setting, tmp_path / "home")
