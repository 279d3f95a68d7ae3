"""Key-value caches, which decoders fill by default whenever they are called."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compare import AMPLE, TIGHT, Setting, streamed
from exact import Trace, assert_same, copy_of, seed
from streaming import DIRECT, gradients_of
from zoo import FAMILIES, Batch, llama, loss_of, text

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.module.stream import handle_of

DECODERS = ("gpt2", "llama", "qwen3", "gemma3", "mixtral", "opt", "bloom", "gpt_neox", "t5", "whisper")


def contents(cache: Any, prefix: str = "") -> Trace:
    """Copies of the tensors in a cache, and its length."""
    if hasattr(cache, "self_attention_cache"):
        return contents(cache.self_attention_cache, "self ") | contents(cache.cross_attention_cache, "cross ")
    trace: Trace = {f"{prefix}length": torch.tensor(cache.get_seq_length())}
    for number, layer in enumerate(cache.layers):
        trace |= {f"{prefix}keys {number}": copy_of(layer.keys), f"{prefix}values {number}": copy_of(layer.values)}
    return trace


@pytest.mark.thinned(6)
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


def gemma3n() -> Any:
    """Its last blocks attend to keys and values that earlier ones have left in a dictionary."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = hf.Gemma3nTextConfig(
        **sizes, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, num_kv_shared_layers=2, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        pad_token_id=0,
    )  # fmt: skip
    return hf.Gemma3nForCausalLM(config)


def on_keys(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    loss: torch.Tensor = out.loss + sum(layer.keys.square().mean() for layer in out.past_key_values.layers)
    return loss


@pytest.mark.thinned(4)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize(("make", "loss"), [(gemma3n, loss_of), (llama, on_keys)], ids=["gemma3n", "keys"])
def test_gradients_through_a_cache_are_exact_or_refused(make: Any, loss: Any, disk: bool, tmp_path: Path) -> None:
    """Some gave gradients without those parts, by the timing of the profiled call."""
    torch.manual_seed(1)
    model, home = make().train(), {"folder": tmp_path} if disk else {"home": "device"}
    plain, batch = copy.deepcopy(model), text()
    loss(plain, batch).backward()
    for planner, factor in (("rotor", 1.0), ("rotor", 1.03), ("rotor", 1.05), ("auto", 1.03), ("revolve", 1.0)):
        options = {"device": "cpu", "planner": planner, "machine": DIRECT, **home}
        ours = ts.stream(copy.deepcopy(model), budget=1, **options)
        for _ in range(2):  # the first call of a process measures a little less
            with pytest.raises(BudgetError) as least:
                loss(ours, batch)
        handle_of(ours).budget = ts.Budget(int(factor * least.value.least_nbytes))
        try:
            loss(ours, batch).backward()
        except GradientError as error:
            assert "stage " in str(error)  # noqa: PT017
        else:
            assert_same(gradients_of(plain), gradients_of(ours))
        ts.unstream(ours)


def test_a_budget_that_a_cache_exceeds_says_what_to_call_with() -> None:
    model = llama()
    with_cache = {"input_ids": torch.zeros(4, 16, dtype=torch.long), "labels": torch.zeros(4, 16, dtype=torch.long)}
    ts.stream(model, device="cpu", budget=1, home="device")
    with pytest.raises(BudgetError, match=r"keys and values, in a cache\): .* use_cache=False") as wanted:
        model(**with_cache)
    with pytest.raises(BudgetError) as less:
        model(**with_cache, use_cache=False)
    assert "use_cache" not in str(less.value)
    assert (less.value.least_nbytes or 0) < (wanted.value.least_nbytes or 0)
    ts.unstream(model)
