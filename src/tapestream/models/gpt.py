"""GPT-2 and GPT-3 as an ordinary `nn.Module`, cheap to build on the meta device and exact to build block by block.

Sizes and layout: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), and
Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1 (GPT-3; every layer attends densely here).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.errors import InputError
from tapestream.models._random import keyed_generator
from tapestream.models.shapes import GPT_SIZES

_STD = 0.02
_CHUNK = 2**20  # numbers drawn at once, so that a large matrix needs no second copy of itself


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT.

    ``vocabulary``: number of tokens; ``context``: longest sequence in tokens; ``dropout``: probability, of embeddings,
    attention weights and residual branches; ``tied``: the head shares the token embedding's matrix; ``shared``: every
    layer has the parameters of the first (Lan et al. 2020, "ALBERT"), which exist once; ``halves``: attention and MLP
    of a layer are blocks of their own, so that fewer parameters need be on the device at once.
    Raises InputError where the numbers do not fit together.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 2048
    dropout: float = 0.0
    tied: bool = True
    shared: bool = False
    halves: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"GPTConfig: {name} must be at least 1, not {getattr(self, name)!r}")
        if self.width % self.heads:
            raise InputError(
                f"GPTConfig: width {self.width} is not a multiple of heads {self.heads}; "
                f"the next width that is: {self.width + self.heads - self.width % self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"GPTConfig: dropout must be at least 0 and below 1, not {self.dropout!r}")
        if not self.dtype.is_floating_point:
            raise InputError(f"GPTConfig: dtype must be a floating-point type such as torch.bfloat16, not {self.dtype}")

    @classmethod
    def named(cls, name: str) -> Self:
        """A published size such as ``"gpt2-124m"`` or ``"gpt3-175b"``; InputError lists all names."""
        if name.lower() not in GPT_SIZES:
            raise InputError(
                f"no GPT is named {name!r}; choose one of {', '.join(GPT_SIZES)}, or give GPTConfig the numbers"
            )
        layers, width, heads, context = GPT_SIZES[name.lower()]
        return cls(layers, width, heads, context=context)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: 4 w^2 of attention, 8 w^2 of MLP, and 13 w of biases and LayerNorms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """All parameters; tied and shared ones are counted once."""
        tables = self.vocabulary * (1 if self.tied else 2) + self.context
        return (1 if self.shared else self.layers) * self.block_parameters + self.width * (tables + 2)


class Block(nn.Module):
    """One pre-LayerNorm transformer block, or one half of it: tensor (batch, sequence, width) in, the same shape out.

    ``parts``: "attention", "mlp" or both. A block made on the meta device gets its bits from
    ``block.to_empty(device=...)`` and ``block.initialize()``; they depend on ``config``, ``index``, ``seed`` and
    ``parts`` only, so they are those of a model made at once, on every device.
    """

    def __init__(
        self, config: GPTConfig, index: int, *, seed: int = 0, parts: tuple[str, ...] = ("attention", "mlp")
    ) -> None:
        super().__init__()
        self.config, self.index, self.seed, self.parts = config, index, seed, parts
        width, dtype = config.width, config.dtype
        with _made_once(self):
            if "attention" in parts:
                self.attention_norm = nn.LayerNorm(width, dtype=dtype)
                self.attention_in = nn.Linear(width, 3 * width, dtype=dtype)
                self.attention_out = nn.Linear(width, width, dtype=dtype)
            if "mlp" in parts:
                self.mlp_norm = nn.LayerNorm(width, dtype=dtype)
                self.mlp_in = nn.Linear(width, 4 * width, dtype=dtype)
                self.mlp_out = nn.Linear(4 * width, width, dtype=dtype)
            self.dropout = nn.Dropout(config.dropout)

    def initialize(self) -> None:
        """GPT-2's initial values, in place: normal with 0.02, residual projections scaled by 1/sqrt(2 layers)."""
        if self.config.shared and self.index > 0:
            return  # they are the first block's
        generator = keyed_generator(self.seed, self.index if len(self.parts) == 2 else f"{self.index} {self.parts[0]}")
        residual_std = _STD / math.sqrt(2 * self.config.layers)
        for part in self.parts:
            norm, first, last = (
                (self.attention_norm, self.attention_in, self.attention_out)
                if part == "attention"
                else (self.mlp_norm, self.mlp_in, self.mlp_out)
            )
            _initialize_norm(norm)
            for linear, std in ((first, _STD), (last, residual_std)):
                _fill_normal(linear.weight, std, generator)
                _fill(linear.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> (batch, sequence, width)."""
        if "attention" in self.parts:
            x = x + self.dropout(self._attention(self.attention_norm(x)))
        if "mlp" in self.parts:
            hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
            x = x + self.dropout(self.mlp_out(hidden))
        return x

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.attention_in(x).unflatten(-1, (3, self.config.heads, -1))  # batch, sequence, 3, heads, head size
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.config.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        result: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return result


class GPT(nn.Module):
    """A decoder-only language model: embeddings, ``blocks``, final LayerNorm, head.

    Under ``torch.device("meta")`` nothing is allocated; give the bytes later with ``to_empty`` and ``initialize``, for
    the whole model or block by block. The order does not matter: ``initialize`` passes over what is still on meta.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        with _made_once(self):
            self.token, self.position = (
                nn.Embedding(rows, config.width, _weight=torch.empty(rows, config.width, dtype=config.dtype))
                for rows in (config.vocabulary, config.context)  # given none it draws on meta: seconds of imports
            )
            self.dropout = nn.Dropout(config.dropout)
            parts = [("attention",), ("mlp",)] if config.halves else [("attention", "mlp")]
            self.blocks = nn.ModuleList(
                Block(config, index, seed=seed, parts=part) for index in range(config.layers) for part in parts
            )
            self.norm = nn.LayerNorm(config.width, dtype=config.dtype)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False, dtype=config.dtype)
            self._tie()

    def initialize(self) -> None:
        """GPT-2's initial values, in place; makes one again what ``to_empty`` has parted."""
        self._tie()
        generator = keyed_generator(self.seed, "outside")
        for table in (self.token, self.position):
            _fill_normal(table.weight, _STD, generator)
        if not self.config.tied:
            _fill_normal(self.head.weight, _STD, generator)
        _initialize_norm(self.norm)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialize()

    def get_output_embeddings(self) -> nn.Linear:
        """The head, as in transformers: `tapestream.stream` looks for it with ``loss_chunks``."""
        return self.head

    def _tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.token.weight
        period = len(self.blocks) // self.config.layers
        for k, block in enumerate(self.blocks[period:] if self.config.shared else ()):
            for module, first in zip(block.modules(), self.blocks[k % period].modules(), strict=True):
                for name, parameter in first.named_parameters(recurse=False):
                    setattr(module, name, parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, sequence, vocabulary) of integer ``tokens`` (batch, sequence).

        With ``targets`` (the same shape): their mean cross-entropy in nats, a scalar of at least float32. Raises
        InputError for a sequence longer than the context.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise InputError(
                f"a sequence of {length} tokens is longer than the context of {self.config.context}; "
                f"shorten it or make the model with GPTConfig(context={length})"
            )
        x = self.dropout(self.token(tokens) + self.position(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a bfloat16 loss has three digits
        return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


@contextmanager
def _made_once(owner: Block | GPT) -> Iterator[None]:
    """Build on meta, then allocate and initialise once: the layers' own default initialisation costs nothing."""
    device = torch.get_default_device()
    with torch.device("meta"):
        yield
    if device.type != "meta":
        owner.to_empty(device=device)
        owner.initialize()


def _initialize_norm(norm: nn.LayerNorm) -> None:
    _fill(norm.weight, 1.0)
    _fill(norm.bias, 0.0)


@torch.no_grad()
def _fill(parameter: Tensor, value: float) -> None:
    parameter.fill_(value)


@torch.no_grad()
def _fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers drawn in float32 on the CPU, so that neither device nor dtype changes more than their rounding."""
    if parameter.is_meta:
        return
    for piece in torch.split(parameter.view(-1), _CHUNK):
        piece.copy_(torch.empty(len(piece), device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator))
