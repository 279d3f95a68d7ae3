"""Folders of ``save_pretrained`` are read as ``from_pretrained`` reads them, straight to where blocks live."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from exact import assert_same
from streaming import DIRECT, all_of
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import FAMILIES, WORDS

import tapestream as ts
from tapestream.errors import InputError

Make = Callable[[], Any]
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = BERT | {"vocab_size": WORDS, "num_key_value_heads": 2}
QWEN = LLAMA | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
DEEPSEEK = BERT | {
    "vocab_size": WORDS, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
CONVERTED: dict[str, Make] = {
    **{name: FAMILIES[name].make for name in ("mixtral", "vit", "gpt_neox", "segformer", "swin")},
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**QWEN)),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK)),
}


def saved(make: Make, folder: Path) -> Path:
    torch.manual_seed(1)
    make().save_pretrained(folder, max_shard_size="40KB")
    return folder


def read(make: Make, folder: Path, home: Path) -> Any:
    with torch.device("meta"):
        model = make()
    torch.manual_seed(7)
    return ts.stream(model, device="cpu", machine=DIRECT, budget="1 MiB", folder=home, weights=folder)


def loaded(make: Make, folder: Path) -> Any:
    kind = type(make())
    torch.manual_seed(7)
    return kind.from_pretrained(folder)


def check(make: Make, folder: Path, home: Path) -> None:
    expected = loaded(make, folder)
    ours = read(make, folder, home)
    assert_same(all_of(expected), all_of(ours))
    ts.unstream(ours)


@pytest.mark.parametrize("name", CONVERTED)
def test_weights_that_are_saved_under_other_names_and_in_pieces(name: str, tmp_path: Path) -> None:
    check(CONVERTED[name], saved(CONVERTED[name], tmp_path / "saved"), tmp_path / "home")


def test_a_base_model_gains_a_head_and_a_head_is_left_out(tmp_path: Path) -> None:
    base = lambda: hf.GPT2Model(hf.GPT2Config(**GPT2))  # noqa: E731
    whole = lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))  # noqa: E731
    check(whole, saved(base, tmp_path / "base"), tmp_path / "home")  # the head is the embedding's weight
    check(base, saved(whole, tmp_path / "whole"), tmp_path / "home")


@pytest.mark.parametrize(
    ("one", "other", "new", "old"),
    [
        pytest.param(
            lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, **BERT)),
            lambda: hf.BertForSequenceClassification(hf.BertConfig(vocab_size=WORDS, **BERT)),
            "4 initialised, missing from the files: bert.pooler.dense.weight, bert.pooler.dense.bias, "
            "classifier.weight, classifier.bias", "5 left out: cls.predictions.bias", id="bert",
        ),
        pytest.param(
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
            lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA, pad_token_id=0)),
            "1 initialised, missing from the files: score.weight", "1 left out: lm_head.weight", id="llama",
        ),
    ],
)  # fmt: skip
def test_a_new_head_is_initialised_and_warned_about(one: Make, other: Make, new: str, old: str, tmp_path: Path) -> None:
    folder = saved(one, tmp_path / "saved")
    expected = loaded(other, folder)
    with pytest.warns(UserWarning, match=rf"{new}; {old}"):
        ours = read(other, folder, tmp_path / "home")
    assert_same(all_of(expected), all_of(ours))
    ts.unstream(ours)


def test_layers_that_one_side_lacks_are_refused(tmp_path: Path) -> None:
    three = lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))  # noqa: E731
    two = lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}))  # noqa: E731
    with pytest.raises(InputError, match=r"9 missing from the files: model\.layers\.2\..*the configuration that"):
        read(three, saved(two, tmp_path / "two"), tmp_path / "home")
    with pytest.raises(InputError, match=r"9 not in the model: model\.layers\.2\."):
        read(two, saved(three, tmp_path / "three"), tmp_path / "home")


class NothingWhole(TorchDispatchMode):
    """Fails where tensors with bytes are put together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.stack.default, torch.ops.aten.cat.default):
            assert found.is_meta, "experts were put together outside of their place"
        return found


def test_experts_are_read_to_their_place_one_by_one(tmp_path: Path) -> None:
    folder = saved(CONVERTED["mixtral"], tmp_path / "saved")
    with NothingWhole():
        ours = read(CONVERTED["mixtral"], folder, tmp_path / "home")
    ts.unstream(ours)


def test_what_was_saved_by_older_models_is_left_out_silently(tmp_path: Path) -> None:
    """GPT-2's files of the Hub have masks, which its class names as such."""
    from safetensors.torch import load_file, save_file

    base = lambda: hf.GPT2Model(hf.GPT2Config(**GPT2))  # noqa: E731
    torch.manual_seed(1)
    base().save_pretrained(folder := tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), folder, tmp_path / "home")


def test_without_weights_a_meta_model_is_initialised_as_transformers_does(tmp_path: Path) -> None:
    """GPT-2's blocks give some matrices of modules within them a smaller deviation."""
    make = lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))  # noqa: E731
    with torch.device("meta"):
        ours = make()
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel lay on the meta device.*drew them anew, for 21 modules"):
        ts.unstream(ts.stream(ours, device="cpu", budget="1 MiB", folder=tmp_path))
    for name, p in make().named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).std(), p.std(), rtol=0.25, atol=0)
