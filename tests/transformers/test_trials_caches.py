"""Key-value caches, which decoders fill by default whenever they are called."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import AMPLE, TIGHT, Setting, streamed
from exact import Trace, assert_same, copy_of, seed
from streaming import gradients_of
from zoo import FAMILIES

DECODERS = ("gpt2", "llama", "qwen3", "gemma3", "mixtral", "opt", "bloom", "gpt_neox", "t5", "whisper")


def contents(cache: Any, prefix: str = "") -> Trace:
    """Copies of the tensors in a cache, and its length."""
    if hasattr(cache, "self_attention_cache"):
        return contents(cache.self_attention_cache, "self ") | contents(cache.cross_attention_cache, "cross ")
    trace: Trace = {f"{prefix}length": torch.tensor(cache.get_seq_length())}
    for number, layer in enumerate(cache.layers):
        trace |= {f"{prefix}keys {number}": copy_of(layer.keys), f"{prefix}values {number}": copy_of(layer.values)}
    return trace


@pytest.mark.parametrize("setting", [TIGHT, AMPLE], ids=["tight", "ample"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_is_filled_once(name: str, setting: Setting, tmp_path: Path) -> None:
    family = FAMILIES[name]
    theirs = family.model()
    ours = copy.deepcopy(theirs)
    traces = []
    with streamed(ours, family, setting, tmp_path / "home") as (model, _):
        for each in (theirs, model):
            seed(3)
            out = each(**family.batch(), use_cache=True)
            out.loss.backward()
            traces.append(contents(out.past_key_values) | gradients_of(each) | {"loss": copy_of(out.loss)})
            each.zero_grad()
            seed(3)
            with torch.no_grad():
                out = each(**family.batch(), use_cache=True)
            later = contents(out.past_key_values).items()
            traces[-1] |= {f"without gradients {key}": tensor for key, tensor in later}
    assert_same(*traces)
