"""`outlines.outline`: what is said of a model before it exists, against what `tapestream.stream` measures of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.costs import Profile
from tapestream.costs.rates import Rates
from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.outlines.outline import Outline
from tapestream.frontends.outlines.outlining import outline
from tapestream.ir import Tier
from tapestream.models import GPT, GPTConfig

WIDTH, WORDS = 32, 96
Call = dict[str, Any]


def measured(model: nn.Module, args: tuple[Any, ...] = (), **kwargs: Any) -> list[Profile]:
    """The profiles that a streamed model plans with, without an optimizer; with the gradients that it counts from the
    end of the backward on, which an outline counts throughout."""
    ts.stream(model, device="cpu", budget="1GiB", home="device")
    model(*args, **kwargs)
    last = handle_of(model).last
    assert last is not None
    ts.unstream(model)
    return [replace(p.profile, outside_nbytes=p.profile.outside_nbytes + last.late.nbytes) for p in last.plans]


def profiles(found: Outline) -> tuple[Profile, ...]:
    return found.profiles(rates=FLOPS, optimizer="sgd", update="backward", home=Tier.DEVICE)


def nbytes(profile: Profile) -> int:
    """Everything held with everything stored."""
    tape = sum(s.saved_nbytes + s.output_nbytes for s in profile.stages) + sum(c.nbytes for c in profile.carried)
    blocks = sum(b.parameters_nbytes + b.gradient_nbytes for b in profile.blocks)
    return tape + blocks + profile.outside_nbytes + profile.initial_nbytes + profile.turn_nbytes


def assert_alike(said: Profile, real: Profile, tolerance: float = 0.1) -> None:
    assert len(said) == len(real)
    assert nbytes(said) == pytest.approx(nbytes(real), rel=tolerance)
    assert said.outside_nbytes == pytest.approx(real.outside_nbytes, rel=tolerance)
    assert said.initial_nbytes == real.initial_nbytes
    for a, b in zip(said.stages, real.stages, strict=True):
        assert a.saved_nbytes == pytest.approx(b.saved_nbytes, rel=tolerance)
        assert a.output_nbytes == b.output_nbytes
        assert a.cotangent_bytes == b.cotangent_bytes
        assert a.block == b.block
        assert (a.reads_input, a.reads_output) == (b.reads_input, b.reads_output)


def words(length: int = 16) -> torch.Tensor:
    return torch.randint(5, WORDS, (2, length))


def bert() -> tuple[Any, Call]:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, **sizes)), {"input_ids": words(), "labels": words()}


def llama() -> tuple[Any, Call]:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = hf.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **sizes)
    return hf.LlamaForCausalLM(config), {"input_ids": words(), "labels": words(), "use_cache": False}


def with_cache() -> tuple[Any, Call]:
    model, call = llama()
    return model, call | {"use_cache": True}


def mixtral() -> tuple[Any, Call]:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.MixtralConfig(vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4, **sizes)
    return hf.MixtralForCausalLM(config), {"input_ids": words(), "labels": words()}


def vit() -> tuple[Any, Call]:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(4, (2,))}


def t5() -> tuple[Any, Call]:
    hf = pytest.importorskip("transformers")
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": words(), "labels": words(9)}


class Residual(nn.Module):
    """Sums between the blocks: a chain each. The first two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.blocks[1][0].weight = self.blocks[0][0].weight  # type: ignore[index, union-attr]
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


def residual() -> tuple[Any, Call]:
    return Residual(), {"x": torch.randn(8, WIDTH)}


def every_block_twice() -> tuple[Any, Call]:
    class Repeated(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x).sum()

    return Repeated(), {"x": torch.randn(8, WIDTH)}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # transformers does, on PyTorch 2.9
@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", [bert, llama, with_cache, mixtral, vit, t5, residual, every_block_twice])
def test_bytes_are_those_that_streaming_finds(make: Callable[[], tuple[Any, Call]]) -> None:
    torch.manual_seed(0)
    model, call = make()
    model.train()
    real = measured(model, **call)
    said = profiles(outline(model, (), call))
    assert len(said) == len(real)
    for one, other in zip(said, real, strict=True):
        # transformers makes a mask of (batch, 1, length, length) where it sees fake tensors: see `huggingface`.
        assert_alike(one, other, 0.12 if make in (llama, with_cache, mixtral) else 0.1)


FLOPS = Rates(1.0, 1e30, 0.0)  # seconds are floating-point operations
CONFIG = GPTConfig(3, 128, 4, vocabulary=256, context=64)


def test_our_gpt_is_known_in_three_ways() -> None:
    tokens = torch.randint(256, (2, 64))
    (real,) = measured(GPT(CONFIG), (tokens, tokens))
    found = outline(GPT(CONFIG), (tokens, tokens))
    (said,) = profiles(found)
    assert_alike(said, real, 0.01)
    assert found.parameters == CONFIG.parameters
    # By hand: 2 operations per weight and token, 2 s w per token for causal attention, which backward, as kernels have
    # it, does 2.5 times; and 15 states of saved tensors with the statistics of attention and norms.
    state, linear, attention = 2 * 64 * 128, 2 * 2 * 64 * CONFIG.block_parameters, 2 * 2 * 64 * 64 * 128
    for cost in said.stages:
        assert cost.forward_seconds == pytest.approx(linear + attention, rel=0.02)
        assert cost.backward_seconds == pytest.approx(2 * linear + 2.5 * attention, rel=0.02)
        assert cost.output_nbytes == 4 * state
        assert cost.saved_nbytes == pytest.approx(15 * 4 * state + 4 * 2 * 64 * (4 + 4), rel=0.02)
    assert said.turn_seconds == 6 * state * 256
    assert found.flops == pytest.approx(
        said.turn_seconds + sum(s.forward_seconds + s.backward_seconds for s in said.stages)
    )


def test_the_model_is_afterwards_as_before_and_can_be_outlined_again() -> None:
    model = Residual()
    model.register_buffer("seen", torch.ones(3))
    before = dict(model.state_dict(keep_vars=True))
    classes = [type(m) for m in model.modules()]
    first = outline(model, (torch.randn(8, WIDTH),))
    second = outline(model, (torch.randn(16, WIDTH),))
    assert all(value is before[name] for name, value in model.state_dict(keep_vars=True).items())
    assert [type(m) for m in model.modules()] == classes
    assert model(torch.ones(8, WIDTH)).item() > 0
    assert second.segments[0].stages[0].output_nbytes == 2 * first.segments[0].stages[0].output_nbytes


def test_random_generators_are_not_drawn_from() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))
    before = torch.get_rng_state()
    outline(model, (torch.ones(4, 8),))
    assert torch.equal(before, torch.get_rng_state())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.map(x)
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, None, 0.1).transpose(1, 2).flatten(2)


def test_dropout_within_attention_keeps_nothing_on_a_gpu() -> None:
    model, x = nn.Sequential(*(Attending() for _ in range(3))), torch.empty(2, 64, WIDTH)
    cpu, gpu = (outline(model, (x,), device=device).segments[0].stages[1] for device in ("cpu", "cuda"))
    assert cpu.saved_nbytes - gpu.saved_nbytes >= 2 * 4 * 64 * 64 * 4  # at least the scores, batch x heads x 64 x 64
    assert gpu.output_nbytes == cpu.output_nbytes


def test_a_chance_or_an_overflow_that_is_read_is_taken_not_to_happen() -> None:
    class Careful(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if torch.isinf(x).any() or torch.rand([]) < 0.1:
                x = torch.cat([x, x])
            return x

    found = outline(nn.Sequential(*(Careful(8, 8) for _ in range(3))), (torch.ones(4, 8),))
    assert [s.output_nbytes for s in found.segments[0].stages] == [4 * 8 * 4] * 3


def test_what_depends_on_numbers_is_refused() -> None:
    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.sum().item()

    with pytest.raises(InputError, match=r"reads a number of type torch.float32.*tapestream\.plan\(model, batch\)"):
        outline(nn.Sequential(*(Reading(8, 8) for _ in range(3))), (torch.ones(4, 8),))


@pytest.mark.parametrize(
    ("model", "call", "match"),
    [
        (nn.Linear(4, 4), (torch.ones(4, 4),), "no blocks were found"),
        (Residual(), (torch.ones(4, 4),), "check the example batch"),
    ],
)
def test_what_cannot_be_outlined_is_said(model: nn.Module, call: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        outline(model, call)


DISK = ts.Link(1e9)
MACHINE = ts.Machine({(ts.Tier.DISK, ts.Tier.DEVICE): DISK, (ts.Tier.DEVICE, ts.Tier.DISK): DISK})


class Words(nn.Module):
    """An embedding of 1 MiB and a head that uses its weight, by calling a module or itself."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(2**13, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.direct, self.head = direct, nn.Linear(WIDTH, 2**13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.head.weight) if self.direct else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Places(nn.Embedding):
    """A table of positions that is called with a shape."""

    def forward(self, shape: torch.Size) -> torch.Tensor:
        return super().forward(torch.arange(shape[-1]))


class Placed(Words):
    def __init__(self) -> None:
        super().__init__(direct=False)
        self.places = Places(2**13, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(tokens.shape)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def gpt() -> nn.Module:
    return GPT(GPTConfig(3, 64, 4, vocabulary=2**13, context=32))


@pytest.mark.parametrize(
    ("make", "coming"),
    [
        (lambda: Words(direct=False), ["Embedding", "Linear"]),
        (lambda: Words(direct=True), []),
        (Placed, ["Embedding", "Linear"]),
        (gpt, ["Embedding", "Linear"]),
    ],
    ids=["called", "direct", "placed", "gpt"],
)
def test_embeddings_and_heads_come_and_go_as_when_streamed(
    make: Callable[[], nn.Module], coming: list[str], tmp_path: Path
) -> None:
    tokens = torch.randint(2**13, (2, 16))
    args = (tokens, tokens) if make is gpt else (tokens,)
    model = make()
    ts.stream(model, device="cpu", budget="1GiB", folder=tmp_path, machine=MACHINE)
    ts.optimizer(model, torch.optim.AdamW, lr=0.1)
    model(*args)
    last = handle_of(model).last
    assert last is not None
    real = last.profiles
    ts.unstream(model)
    found = outline(model, args)
    said = found.profiles(rates=FLOPS, budget_nbytes=2**30)
    found_to_come = [type(found.modules[k]).__name__ for s in found.segments for k in s.positions if k >= found.wide]
    assert found_to_come == coming
    for one, other in zip(said, real, strict=True):
        assert_alike(one, other, 0.01)
        pairs = zip(one.blocks, other.blocks, strict=False)  # those that turned out to stay come last and cost nothing
        assert one.blocks == tuple(replace(b, update_seconds=a.update_seconds) for a, b in pairs)
    (stays, *_) = outline(model, args, moves=False).profiles(rates=FLOPS)
    assert stays.outside_nbytes >= 4 * 2**20


@pytest.mark.parametrize("chunks", ["auto", 8])
@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_in_chunks_is_known_as_streamed(tied: bool, chunks: Any, tmp_path: Path) -> None:
    """Every byte, of a head that comes and goes."""
    tokens = torch.randint(2**13, (4, 64))
    model = GPT(GPTConfig(3, 128, 4, vocabulary=2**13, context=64, tied=tied))
    ts.stream(model, device="cpu", budget="1GiB", folder=tmp_path, machine=MACHINE, loss_chunks=chunks)
    ts.optimizer(model, torch.optim.AdamW, lr=0.1)
    model(tokens, tokens)
    last = handle_of(model).last
    assert last is not None
    real = last.profiles
    ts.unstream(model)
    classes = [type(module) for module in model.modules()]
    said = outline(model, (tokens, tokens), loss_chunks=chunks).profiles(rates=FLOPS, budget_nbytes=2**30)
    assert [type(module) for module in model.modules()] == classes
    for one, other in zip(said, real, strict=True):
        assert_alike(one, other, 0.01)
        assert one.turn_nbytes == other.turn_nbytes
    whole = outline(model, (tokens, tokens)).profiles(rates=FLOPS, budget_nbytes=2**30)
    assert whole[-1].turn_nbytes > 10 * said[-1].turn_nbytes
    # One product in four is a recompute: that of the forward, of three.
    made = whole[-1].stages[-1]
    chunked = said[-1].stages[-1]
    stored = made.forward_seconds + made.backward_seconds
    assert chunked.forward_seconds + chunked.backward_seconds == pytest.approx(stored * 4 / 3, rel=0.01)


def test_a_loss_in_chunks_needs_a_head() -> None:
    with pytest.raises(InputError, match="loss_chunks needs a head"):
        outline(Residual(), (torch.ones(4, WIDTH),), loss_chunks="auto")


def test_seconds_are_those_of_bytes_and_of_products() -> None:
    """By hand: one block of a norm, a product and an addition; launches cost nothing here."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(self.norm(x))

    rows, width = 256, 64
    found = outline(nn.Sequential(Block(), Block()), (torch.randn(rows, width),))
    state, statistics, weights = 4 * rows * width, 2 * 4 * rows, 4 * (width * width + width)
    moved = (2 * state + statistics + 2 * 4 * width) + (2 * state + weights) + 3 * state
    ((first, *_),) = (p.stages for p in found.profiles(rates=Rates(1e30, 1.0, 0.0)))
    assert first.forward_seconds == moved
    ((first, *_),) = (p.stages for p in found.profiles(rates=Rates(1.0, 1e30, 0.0)))
    assert first.forward_seconds == pytest.approx(2 * rows * width * width)
    ((first, *_),) = (p.stages for p in found.profiles(rates=Rates(1e30, 1e30, 1.0)))
    assert first.forward_seconds == pytest.approx(3)
    assert first.backward_seconds == pytest.approx(4)  # the norm, two products, the sum of the bias's gradient
