"""`generate()` of streamed models: every way of decoding gives plain's tokens, and training goes on as in plain."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import KNOBS, adamw
from exact import Trace, assert_same, copy_of, seed
from streaming import DIRECT, everything, gradients_of, state_of
from zoo import BATCH, FAMILIES, loss_of, sound, words

import tapestream as ts
from tapestream.frontends.module.stream import handle_of

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "uncached": {"use_cache": False},
}
Trio = tuple[str, Any, Any]


def prompt(name: str) -> dict[str, torch.Tensor]:
    if name == "whisper":
        return {"input_features": sound()["input_features"]}
    return {"input_ids": words(6), "attention_mask": torch.ones(BATCH, 6, dtype=torch.long)}


def generated(model: Any, name: str, way: dict[str, Any], number: int) -> Trace:
    """Tokens and scores of one call."""
    seed(10 + number)
    out = model.generate(
        **prompt(name), max_length=None, max_new_tokens=7, output_scores=True, return_dict_in_generate=True, **way
    )
    scores = {f"{number} score {k}": copy_of(score) for k, score in enumerate(out.scores)}
    return scores | {f"{number} tokens": out.sequences, f"{number} torch": torch.get_rng_state()}


def prepared(name: str) -> Any:
    model = FAMILIES[name].model()
    # Whisper has lists of tokens of its own, for a larger vocabulary.
    for field in ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"):
        if hasattr(model.generation_config, field):
            setattr(model.generation_config, field, None)
    return model


@contextlib.contextmanager
def side_by_side(name: str, folder: Path) -> Iterator[Trio]:
    """A family, a plain model of it, and one with room for some of its blocks, at home on disk."""
    theirs = prepared(name)
    ours = copy.deepcopy(theirs)
    ts.stream(ours, device="cpu", machine=DIRECT, budget="1 MiB", folder=folder)
    handle = handle_of(ours)
    largest = max(block.layout.nbytes for block in handle.store.blocks)
    total = sum(p.nbytes for p in ours.parameters())
    handle.budget = ts.Budget(total + 3 * largest + 100_000)
    try:
        yield name, theirs, ours
    finally:
        ts.unstream(ours)


@pytest.fixture(params=["gpt2", "llama", "t5", "whisper"])
def trio(request: Any, tmp_path: Path) -> Iterator[Trio]:
    with side_by_side(request.param, tmp_path / "home") as found:
        yield found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_scores_are_those_of_plain_pytorch(trio: Trio, way: str) -> None:
    compare_tokens(trio, way)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "opt", "bloom", "gpt_neox", "mamba"])
def test_other_decoders_with_their_caches(name: str, tmp_path: Path) -> None:
    """Sliding windows, states in place of keys and values, experts, biases by position."""
    with side_by_side(name, tmp_path / "home") as trio:
        compare_tokens(trio, "greedy")


def compare_tokens(trio: Trio, way: str) -> None:
    name, theirs, ours = trio
    traces = []
    for model in (theirs, ours):
        model.eval()
        traces.append({k: t for number in range(2) for k, t in generated(model, name, WAYS[way], number).items()})
    assert_same(*traces)
    assert not handle_of(ours).store.copies.tickets


def test_within_bfloat16_autocast(trio: Trio) -> None:
    name, theirs, ours = trio
    traces = []
    for model in (theirs, ours):
        with torch.autocast("cpu", torch.bfloat16):
            traces.append(generated(model.eval(), name, {}, 0))
    assert_same(*traces)


def test_training_between_and_after(trio: Trio) -> None:
    """Steps of AdamW with `generate` before, between forward and backward, and after: losses, gradients, weights."""
    name, theirs, ours = trio
    handle_of(ours).budget = ts.Budget(2**24)
    family = FAMILIES[name]
    traces = []
    for model, optimizer in (
        (theirs, torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **KNOBS)),
        (ours, adamw(ours)),
    ):
        trace: Trace = {}
        for step in range(3):
            trace |= generated(model, name, {}, step)
            model.train()
            seed(step)
            loss = loss_of(model, family.batch(step))
            model.eval()
            trace |= generated(model, name, WAYS["sampling"], 100 + step)
            model.train()
            loss.backward()
            trace |= {f"{step} gradient {key}": tensor for key, tensor in gradients_of(model).items()}
            trace |= {f"{step} loss": copy_of(loss)}
            optimizer.step()
            optimizer.zero_grad()
            trace |= everything(model, f"{step} after ")
        traces.append(trace | state_of(optimizer))
    assert_same(*traces)
