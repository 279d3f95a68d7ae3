"""Mixtral whose router sends all tokens to two experts, after a profile of even routing: bits and bytes.

With one product per expert ("eager") a block's transient bytes depend on how many tokens the busiest expert gets. The
profile has seen an even batch, and bounds what any other takes. Grouped products, the default, take the same bytes
however tokens are routed, and need no bound.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compare import KNOBS, adamw, tighten
from exact import assert_same
from streaming import DIRECT, everything

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.frontends.module.stream import handle_of

EXPERTS, WIDTH, TOKENS, WORDS = 8, 32, 512, 64
EVEN = (None, 0.0)
BATCHES = (EVEN, EVEN, (0, 1.0), (3, 1.0), (7, 1.0), (0, 0.9), (6, 0.5), EVEN)
"""The first of two experts that get tokens, and which share of them."""


def routed(experts: str) -> Any:
    """Tokens n, n + 8, n + 16 .. go to experts n and n + 1: embeddings and routers share their directions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, use_cache=False,
        max_position_embeddings=TOKENS, experts_implementation=experts, **sizes,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    with torch.no_grad():
        directions, word = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0], torch.arange(WORDS)
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(10 * directions[:EXPERTS])
        chosen = directions[word % EXPERTS] + 0.5 * directions[(word + 1) % EXPERTS]
        model.model.embed_tokens.weight.copy_(chosen + 0.01 * torch.randn(WORDS, WIDTH))
    return model


def tokens(number: int, expert: int | None, share: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(0, WORDS, (2, TOKENS), generator=generator)
    sent = torch.rand(2, TOKENS, generator=generator) < share
    return words if expert is None else torch.where(sent, words // EXPERTS * EXPERTS + expert, words)


def share_of_busiest(model: Any, batch: torch.Tensor) -> float:
    with torch.no_grad():
        scores = model(input_ids=batch, output_router_logits=True).router_logits
    return min(s.topk(2).indices.flatten().bincount().max().item() / (4 * TOKENS) for s in scores)


def step(model: Any, optimizer: Any, batch: torch.Tensor) -> float:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_skewed_batches_after_an_even_profile(experts: str, tmp_path: Path) -> None:
    ours, batches = routed(experts), BATCHES if experts == "eager" else BATCHES[:4]
    assert share_of_busiest(ours, tokens(0, *EVEN)) < 0.2
    assert share_of_busiest(ours, tokens(0, 0, 1.0)) == 0.5  # a token goes to two experts, never twice to one
    theirs = copy.deepcopy(ours)
    plain = torch.optim.AdamW(theirs.parameters(), **KNOBS)
    expected = [step(theirs, plain, tokens(number, *routing)) for number, routing in enumerate(batches)]

    ts.stream(ours, device="cpu", machine=DIRECT, budget=1, folder=tmp_path)
    optimizer, handle = adamw(ours), handle_of(ours)
    tighten(ours, lambda: ours(input_ids=tokens(0, *EVEN), labels=tokens(0, *EVEN)))
    budget = handle.budget.device_nbytes
    assert budget is not None
    losses, peaks, prepared = [], [], None
    for number, routing in enumerate(batches):
        if number == 0:
            losses.append(step(ours, optimizer, tokens(number, *routing)))  # it measures, and cannot be metered
            first = handle.last
            assert first is not None
            continue
        held = held_nbytes(ours)
        with ts.track_memory("cpu") as meter:
            losses.append(step(ours, optimizer, tokens(number, *routing)))
        peaks.append(held + meter.peak_nbytes)
        prepared = handle.last if number == 1 else prepared  # that has the room of the logits, which have been dropped
        assert handle.last is prepared  # the profile of the even batch serves them all
        assert prepared is not None
        assert prepared.segments[0] is first.segments[0]
    assert losses == expected
    assert max(peaks[1:]) <= budget  # what a step frees is seen only if the step that made it was metered
    ts.unstream(ours)
    assert_same(everything(theirs), everything(ours))
