"""Networks of published shapes whose weights are there in seconds, with no hub: blocks of one random vector.

What is measured here does not depend on what the weights are, as long as losses stay finite.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tapestream.models.gpt import GPT, Block, GPTConfig

_STD = 0.02
_DRAWN = 2**20 - 3  # a prime: rows of a matrix begin at other places of the vector, so that none are alike


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama (Grattafiori et al. 2024, table 3). ``narrow``: heads of keys and values."""

    layers: int
    width: int
    heads: int
    narrow: int
    inner: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_parameters(self) -> int:
        """Queries and outputs, keys and values, three matrices of the MLP, two norms."""
        square, slim = self.width**2, self.width * (self.width // self.heads) * self.narrow
        return 2 * square + 2 * slim + 3 * self.width * self.inner + 2 * self.width

    @property
    def parameters(self) -> int:
        """All: blocks, token embedding, head, last norm."""
        return self.layers * self.block_parameters + (2 * self.vocabulary + 1) * self.width

    def flops(self, batch: int, tokens: int) -> float:
        """Of a forward and a backward (twice the forward's): 2 per weight in a matrix and token, but for the embedding;
        attention's two products, half of each by causality. Recomputes are not counted."""
        matrices = self.layers * (self.block_parameters - 2 * self.width) + self.vocabulary * self.width
        return 3.0 * batch * (2 * matrices * tokens + self.layers * 2 * tokens**2 * self.width)


LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 128_256)
LLAMA_3B = Shape(28, 3072, 24, 8, 8192, 128_256)
TINY = Shape(8, 64, 4, 2, 128, 256)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and fewer keys than queries, and a gated MLP: (batch, tokens, width) to same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width, dtype = shape, shape.width, shape.dtype
        slim = width // shape.heads * shape.narrow
        self.before_attention = nn.RMSNorm(width, 1e-5, dtype=dtype)
        self.query, self.out = (nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(2))
        self.key, self.value = (nn.Linear(width, slim, bias=False, dtype=dtype) for _ in range(2))
        self.before_mlp = nn.RMSNorm(width, 1e-5, dtype=dtype)
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False, dtype=dtype)

    def initialize(self) -> None:
        """Fill what has memory."""
        fill(self, self.shape.layers)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self._attention(self.before_attention(x))
        normed = self.before_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        shape, size = self.shape, self.shape.width // self.shape.heads
        query, key, value = (
            part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(shape.heads // shape.narrow, 1) for part in (rotated(key), value))
        mixed = F.scaled_dot_product_attention(rotated(query), key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Llama(nn.Module):
    """Embedding, ``blocks``, norm, ``head``; called with tokens and targets it gives the mean cross-entropy.
    ``recompute``: PyTorch's checkpointing of each block, for those who have nothing else."""

    recompute = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, dtype = shape, shape.dtype
        empty = torch.empty(shape.vocabulary, shape.width, dtype=dtype)  # given none it would draw
        self.token = nn.Embedding(shape.vocabulary, shape.width, _weight=empty)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5, dtype=dtype)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=dtype)

    def initialize(self) -> None:
        """Fill what has memory."""
        fill(self, self.shape.layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, in float32."""
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class QuickBlock(Block):
    """A block of the project's GPT, filled quickly."""

    def initialize(self) -> None:
        """Fill what has memory; of shared layers the first has it."""
        if not (self.config.shared and self.index):
            fill(self, self.config.layers)


class QuickGPT(GPT):
    """The project's GPT, filled quickly."""

    def initialize(self) -> None:
        """Fill what has memory."""
        self._tie()
        fill(self, self.config.layers)


def llama(shape: Shape) -> Llama:
    """On the meta device: `ts.stream` gives it memory, block by block."""
    with torch.device("meta"):
        return Llama(shape)


def quick_gpt(config: GPTConfig) -> QuickGPT:
    """On the meta device too."""
    with torch.device("meta"):
        model = QuickGPT(config)
    for block in model.blocks:
        block.__class__ = QuickBlock
    return model


def on_device(model: nn.Module, device: str) -> nn.Module:
    """A model from the meta device, all of it on ``device``: what plain PyTorch trains."""
    model.to_empty(device=device).initialize()  # type: ignore[operator]
    return model


@torch.no_grad()
def fill(module: nn.Module, layers: int) -> None:
    """Matrices with pieces of one random vector, those that end a residual branch scaled by 1/sqrt(2 layers); norms
    with ones, biases with zeros. What is on the meta device is passed over."""
    drawn: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        kind = parameter.device, parameter.dtype
        if kind not in drawn:
            drawn[kind] = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).to(*kind)
        last = name.rpartition(".")[0].endswith(("out", "down"))
        _tile(parameter.view(-1), drawn[kind] * (_STD / math.sqrt(2 * layers) if last else _STD))


def _tile(target: Tensor, piece: Tensor) -> None:
    """``target`` as ``piece`` again and again."""
    whole = target.numel() // piece.numel() * piece.numel()
    if whole:
        target[:whole].view(-1, piece.numel()).copy_(piece)  # as fast as memory is
    target[whole:].copy_(piece[: target.numel() - whole])


def rotated(x: Tensor, base: float = 500_000.0) -> Tensor:
    """(batch, heads, tokens, size) turned by its position: Su et al. 2021, "RoFormer"."""
    half, device = x.shape[-1] // 2, x.device
    speeds = base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=device, dtype=torch.float32)[:, None] * speeds
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def batch(vocabulary: int, rows: int, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that come next, the same every time."""
    found = torch.randint(vocabulary, (rows, tokens + 1), generator=torch.Generator().manual_seed(1))
    return found[:, :-1].to(device), found[:, 1:].to(device)
