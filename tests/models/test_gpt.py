"""GPT: published sizes, bits of the initial values, the meta device, causality, training."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.models import GPT, Block, GPTConfig

PUBLISHED = {
    "gpt2-124m": 124e6, "gpt2-355m": 355e6, "gpt2-774m": 774e6, "gpt2-1.5b": 1.558e9,
    "gpt3-125m": 125e6, "gpt3-350m": 350e6, "gpt3-760m": 760e6, "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9, "gpt3-6.7b": 6.7e9, "gpt3-13b": 13e9, "gpt3-175b": 174.6e9,
}  # fmt: skip
TINY = GPTConfig(layers=3, width=16, heads=2, vocabulary=17, context=8)


def same_bits(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_counts_are_the_published_ones_and_those_of_the_module(name: str, count: float) -> None:
    config = GPTConfig.named(name)
    with torch.device("meta"):
        model = GPT(config)
    assert config.parameters == pytest.approx(count, rel=0.02)
    assert config.parameters == sum(p.numel() for p in model.parameters())
    assert config.block_parameters == sum(p.numel() for p in model.blocks[0].parameters())


def test_exact_counts() -> None:
    assert GPTConfig.named("gpt2-124m").parameters == 124_439_808
    assert round(GPTConfig.named("GPT3-175B").parameters / 1e9, 1) == 174.6
    untied = GPTConfig(3, 16, 2, vocabulary=17, context=8, tied=False)
    assert untied.parameters == sum(p.numel() for p in GPT(untied).parameters()) == TINY.parameters + 17 * 16


def test_meta_is_fast_and_allocates_nothing() -> None:
    begin = time.process_time()
    with torch.device("meta"):
        model = GPT(GPTConfig.named("gpt3-175b"))
    assert time.process_time() - begin < 2
    assert len(model.blocks) == 96
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_by_block_gives_the_bits_of_at_once(tied: bool, dtype: torch.dtype) -> None:
    config = GPTConfig(3, 16, 2, vocabulary=17, context=8, tied=tied, dtype=dtype)
    whole = GPT(config, seed=5)
    with torch.device("meta"):
        pieces = GPT(config, seed=5)
    for block in reversed(pieces.blocks):
        assert isinstance(block, Block)
        block.to_empty(device="cpu")
        block.initialize()
    assert pieces.token.weight.is_meta
    for outside in (pieces.token, pieces.position, pieces.norm, pieces.head):
        outside.to_empty(device="cpu")
    pieces.initialize()
    assert same_bits(whole, pieces)
    assert (pieces.head.weight is pieces.token.weight) is tied
    alone = Block(config, 1, seed=5)
    assert same_bits(alone, whole.blocks[1])


def test_seed_and_index_change_the_bits_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    model, other = GPT(TINY, seed=0), GPT(TINY, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert not same_bits(model.blocks[0], model.blocks[1])
    assert not same_bits(model.blocks[0], other.blocks[0])
    assert not torch.equal(model.token.weight, other.token.weight)


def test_initial_values_have_the_spread_of_gpt2() -> None:
    config = GPTConfig(layers=2, width=256, heads=4, vocabulary=256, context=64)
    block = Block(config, 0)
    for linear, std in ((block.mlp_in, 0.02), (block.mlp_out, 0.02 / math.sqrt(4)), (block.attention_out, 0.01)):
        assert linear.weight.std().item() == pytest.approx(std, rel=0.02)
        assert abs(linear.weight.mean().item()) < std / 50
        assert not linear.bias.any()
    assert torch.equal(block.mlp_norm.weight, torch.ones(256))


def test_a_large_matrix_is_drawn_in_pieces_without_repeats() -> None:
    weight = GPT(GPTConfig(1, 8, 1, vocabulary=2**18, context=4)).token.weight  # two pieces of 2**20
    first, second = weight.detach().view(2, -1)
    assert not torch.equal(first, second)
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = GPT(TINY).eval()
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 16
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_blocks_pass_the_same_object_on() -> None:
    model, inputs, outputs = GPT(TINY), [], []

    def note(block: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        inputs.append(given)
        outputs.append(result)

    for block in model.blocks:
        block.register_forward_hook(note)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert all(len(given) == 1 for given in inputs)
    assert all(given[0] is result for given, result in zip(inputs[1:], outputs[:-1], strict=True))


def test_the_loss_is_the_mean_cross_entropy_and_falls() -> None:
    model = GPT(TINY)
    tokens = torch.arange(9).repeat(4, 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    log_probabilities = model(inputs).log_softmax(-1)
    expected = -log_probabilities.gather(-1, targets[..., None]).mean()
    first = model(inputs, targets)
    torch.testing.assert_close(first, expected)
    assert first.item() == pytest.approx(math.log(17), abs=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < first.item() / 2


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTConfig(2, 16, 2, vocabulary=17, context=8, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_loss_of_a_bfloat16_model_is_float32() -> None:
    model = GPT(GPTConfig(1, 16, 2, vocabulary=17, context=8, dtype=torch.bfloat16))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert model(tokens).dtype is torch.bfloat16
    assert model(tokens, tokens).dtype is torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"heads": 3}, "the next width that is: 18"),
        ({"dropout": 1.0}, "below 1"),
        ({"dtype": torch.int64}, "floating-point"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GPTConfig(**{"layers": 2, "width": 16, "heads": 2, **changes})


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"gpt2-124m.*gpt3-175b"):
        GPTConfig.named("gpt4")


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(InputError, match=r"9 tokens.*context of 8"):
        GPT(TINY)(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("shared", [True, False])
def test_halves_of_layers_are_blocks_that_compute_the_same(shared: bool) -> None:
    whole = GPT(replace(TINY, shared=shared))
    halves = GPT(replace(TINY, shared=shared, halves=True), seed=1)
    assert [block.parts for block in halves.blocks if isinstance(block, Block)] == [("attention",), ("mlp",)] * 3
    assert sum(p.numel() for p in halves.parameters()) == TINY.parameters - (2 if shared else 0) * TINY.block_parameters
    given = whole.state_dict()
    for k, block in enumerate(whole.blocks):
        for name in block.state_dict():
            given[f"blocks.{2 * k + name.startswith('mlp')}.{name}"] = whole.state_dict()[f"blocks.{k}.{name}"]
    halves.load_state_dict({name: given[name] for name in halves.state_dict()})
    tokens = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(halves(tokens), whole(tokens))
