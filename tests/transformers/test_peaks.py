"""At the least budget a step's measured peak is within it: norms between blocks and head, caches, tied weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from least import SMALL, least_and_measured

import tapestream as ts

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
CASES = {
    "head with a weight of its own": (hf.LlamaConfig(vocab_size=2304, **SIZES), {}),
    "small head": (hf.LlamaConfig(vocab_size=64, **SIZES), {}),
    "without cache": (hf.LlamaConfig(vocab_size=64, use_cache=False, **SIZES), {}),
    "tied": (hf.Qwen3Config(vocab_size=8192, head_dim=64, tie_word_embeddings=True, **SIZES), {"loss_chunks": "auto"}),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_at_the_least_budget_stays_within_it(name: str, update: str, tmp_path: Path) -> None:
    least, measured = found(name, update, "disk", tmp_path)
    assert 0.8 * least <= measured <= least + SMALL


@pytest.mark.parametrize("update", ["step", "backward"])
def test_in_ram_alone_no_more_is_needed_than_a_step_takes(update: str, tmp_path: Path) -> None:
    least, measured = found("small head", update, "device", tmp_path)
    assert least / 1.02 <= measured <= least + SMALL


def found(name: str, update: str, home: str, folder: Path) -> tuple[int, int]:
    """The least budget, and the peak of a step within it."""
    config, options = CASES[name]
    words = torch.randint(config.vocab_size, (4, 128))
    where: dict[str, Any] = {"home": home} | ({"folder": folder} if home == "disk" else {})

    def start(budget: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        ts.stream(model, device="cpu", budget=budget, **where, **options)
        return model, ts.optimizer(model, torch.optim.AdamW, fused=True, update=update)

    return least_and_measured(start, lambda model: model(input_ids=words, labels=words).loss.backward(), 2**16)
