"""What `tapestream plan` says of Hugging Face models, embeddings and heads that come and go included, is what `stream`
finds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from streaming import DIRECT
from typer.testing import CliRunner
from zoo import FAMILIES, loss_of

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.cli.huggingface import without_packing
from tapestream.costs import Profile
from tapestream.costs.machine import usual_links
from tapestream.errors import BudgetError
from tapestream.frontends.module.homes import wide
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.question import Question

CHOSEN = ("llama", "bert")
OWN = 8192
"""Bytes that kernels allocate for themselves: fake tensors do not show them."""
CONVOLVING = ("segformer",)
"""Half a megabyte of them, in convolutions of blocks, beside 0.8 MB of all else."""


def held_nbytes(profile: Profile) -> int:
    """Everything of a segment, stored."""
    tape = sum(s.saved_nbytes + s.output_nbytes for s in profile.stages) + sum(c.nbytes for c in profile.carried)
    blocks = sum(b.parameters_nbytes + b.gradient_nbytes + b.optimizer_state_nbytes for b in profile.blocks)
    return tape + blocks + profile.initial_nbytes + profile.turn_nbytes


def found_by_stream(model: Any, batch: Any, folder: Path, update: str) -> tuple[int, tuple[Profile, ...], set[Any]]:
    """The least budget, the profiles of every segment, and the kinds of the modules that stay on the device."""
    ts.stream(model, device="cpu", machine=DIRECT, budget=1, folder=folder)
    ts.optimizer(model, torch.optim.AdamW, lr=0.1, update=update)
    handle = handle_of(model)
    with pytest.raises(BudgetError) as told:
        loss_of(model, batch)
    assert told.value.least_nbytes is not None
    handle.budget = ts.Budget(told.value.least_nbytes)
    loss_of(model, batch)
    assert handle.last is not None
    coming = {type(handle.blocks[k]).__mro__[1] for s in handle.last.segments for k in s.positions if k >= handle.wide}
    ts.unstream(model)
    return told.value.least_nbytes, handle.last.profiles, coming


def said_beforehand(model: Any, batch: Any, update: Any) -> tuple[int, tuple[Profile, ...], set[Any]]:
    """The same without running anything."""
    without_packing(model)
    found = outline(model, (), batch)
    speeds = ts.Machine(usual_links("cpu", link=1e9, read=1e9, write=1e9), 1e11)
    none: dict[str, Any] = dict.fromkeys(("gpu", "ram", "disk", "home"))
    question = Question(lambda _: found, 2, "adamw", update, "cpu", budget=1, **none, speeds=speeds)
    with pytest.raises(BudgetError) as told:
        question.plan()
    assert told.value.least_nbytes is not None
    coming = {type(found.modules[k]) for s in found.segments for k in s.positions if k >= found.wide}
    return told.value.least_nbytes, question.profiles(finer=True), coming


@pytest.mark.parametrize("update", ["step", pytest.param("backward", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [n if n in CHOSEN else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
def test_every_family(name: str, update: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(wide, "_LEAST_NBYTES", 1)  # small models have small embeddings
    monkeypatch.setattr(wide, "_SHARE", 1000)
    family = FAMILIES[name]
    real_least, real, really_coming = found_by_stream(family.model(), family.batch(), tmp_path, update)
    least, said, coming = said_beforehand(family.model(), family.batch(), update)
    assert coming == really_coming
    assert len(said) == len(real)
    for one, other in zip(said, real, strict=True):
        assert held_nbytes(one) == pytest.approx(held_nbytes(other), rel=0.05, abs=OWN)
        assert one.outside_nbytes == pytest.approx(other.outside_nbytes, rel=0.05, abs=OWN)
    assert least == pytest.approx(real_least, rel=0.05) or name in CONVOLVING


SIZES: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("update", "tied"),
    [
        ("step", True),
        ("backward", False),
        pytest.param("step", False, marks=pytest.mark.full),
        pytest.param("backward", True, marks=pytest.mark.full),
    ],
)
def test_the_command_names_the_budget_of_a_large_vocabulary(update: str, tied: bool, tmp_path: Path) -> None:
    """16 MiB a matrix: with all that training keeps of it on the device it would take 64 MiB at least."""
    config = hf.Qwen3Config(**SIZES, tie_word_embeddings=tied, use_cache=False, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path / "config")
    ids = torch.randint(5, SIZES["vocab_size"], (1, 64))
    batch = {"input_ids": ids, "labels": ids}
    real_least, _, coming = found_by_stream(hf.Qwen3ForCausalLM(config), batch, tmp_path / "home", update)
    assert coming == {torch.nn.Embedding, torch.nn.Linear}
    arguments = [str(tmp_path / "config"), "--device", "cpu", "--seq", "64", "--update", update, "--json"]
    refused = CliRunner().invoke(make_app(), ["plan", *arguments, "--budget", "1MiB"])
    least = json.loads(refused.stdout)["least_nbytes"]
    assert least == pytest.approx(real_least, rel=0.01)
    assert least < (64 if update == "step" else 56) * 2**20
    accepted = CliRunner().invoke(make_app(), ["plan", *arguments, "--budget", str(real_least * 101 // 100)])
    answer = json.loads(accepted.stdout)["answer"]
    assert answer["tiers"]["device"]["peak_nbytes"] <= real_least * 1.01
    assert answer["tiers"]["disk"]["peak_nbytes"] >= (1 if tied else 2) * 3 * 16 * 2**20  # parameters and two moments
