"""States of Hugging Face models that go to disk between forward and backward: the bits of plain PyTorch."""

import functools
from pathlib import Path

import pytest
from compare import TIGHT, Setting, assert_exact
from zoo import FAMILIES

import tapestream as ts

BFLOAT16 = Setting(training=True, bfloat16=True, sdpa=False, tight=True, disk=True)
CASES = [
    ("gpt2", TIGHT), ("llama", BFLOAT16), ("mixtral", TIGHT), ("bert", BFLOAT16), ("t5", TIGHT), ("whisper", TIGHT),
    ("swin", TIGHT), ("clip", BFLOAT16), ("gemma3", TIGHT), ("resnet", BFLOAT16),
    ("qwen3", TIGHT), ("opt", BFLOAT16), ("bloom", TIGHT), ("gpt_neox", BFLOAT16), ("roberta", TIGHT),
    ("vit", BFLOAT16), ("segformer", TIGHT), ("mamba", TIGHT),
]  # fmt: skip


def test_every_family_is_here() -> None:
    assert {name for name, _ in CASES} == set(FAMILIES)


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_three_steps(name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ts, "stream", functools.partial(ts.stream, planner="offload"))
    assert_exact(FAMILIES[name], setting, tmp_path / "home")
