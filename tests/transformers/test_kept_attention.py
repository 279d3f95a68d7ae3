"""Hugging Face models whose recomputes are given their attention have the bits of plain PyTorch."""

import copy
from pathlib import Path

import pytest
import torch
from compare import KNOBS, Setting, streamed, train
from exact import assert_same
from keeping import keep_whatever_it_takes, kept
from zoo import FAMILIES

import tapestream as ts
from tapestream.frontends.module.stream import handle_of

KEEPING = ("gemma3", "t5", "segformer", "whisper", "clip")  # others have two blocks, of which one is recomputed or none
ATTENDING = [name for name, family in FAMILIES.items() if "sdpa" in family.attentions]


@pytest.mark.thinned(12)
@pytest.mark.parametrize(("number", "name"), list(enumerate(ATTENDING)))
def test_three_steps_have_the_bits_of_plain_pytorch(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_whatever_it_takes(monkeypatch)
    family, found = FAMILIES[name], 0
    setting = Setting(training=False, bfloat16=number % 2 == 1, sdpa=True, tight=True, disk=number % 3 == 0)
    theirs = family.model(setting.attention).train(setting.training)
    ours = copy.deepcopy(theirs)
    trainable = [p for p in theirs.parameters() if p.requires_grad]
    expected = train(theirs, torch.optim.AdamW(trainable, **KNOBS), family, setting)
    for share in (1.1, 1.3, 1.6):
        other = copy.deepcopy(ours)
        with streamed(other, family, setting, tmp_path / "home") as (model, optimizer):
            handle = handle_of(model)
            handle.budget = ts.Budget(int(handle.budget.device_nbytes * share))
            assert_same(expected, train(model, optimizer, family, setting))
            found += sum(kept(plan) for plan in ts.report(model).plans)
    assert found or name not in KEEPING
