"""Models whose embeddings and heads hold most of their bytes, each with another way to use them."""

from collections.abc import Callable
from typing import Any

import torch
from streamable import Model
from torch import nn
from torch.nn import functional as F

WIDTH, VOCABULARY = 16, 2**14  # of float32: 1 MiB, as much as a module needs to be streamed like a block


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Words(nn.Module):
    """Tokens to logits. ``tied``: one weight; ``noise``: dropout between the embedding and the layers."""

    def __init__(
        self, *, tied: bool = True, noise: float = 0.0, bias: bool = False, padding: int | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.noise, self.norm = nn.Dropout(noise), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        nn.init.normal_(self.head.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        return self.noise(x) if self.noise.p else x

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(self.embedded(tokens)))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Outputs(Words):
    """Returns the loss (None without targets) and the logits, as models from transformers do."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.head(self.hidden(self.embedded(tokens)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        return loss, logits


class Positions(Words):
    """A table of positions as large as the embedding."""

    def __init__(self) -> None:
        super().__init__(noise=0.1)
        self.positions = nn.Embedding(VOCABULARY, WIDTH)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.noise(self.embed(tokens) + self.positions(torch.arange(tokens.shape[-1])))


class Places(nn.Embedding):
    """A table that is called with a shape, not with positions."""

    def forward(self, shape: torch.Size) -> torch.Tensor:
        return super().forward(torch.arange(shape[-1]))


class Shaped(Positions):
    """A table of positions that no tensor is given to."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Places(VOCABULARY, WIDTH)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.noise(self.embed(tokens) + self.positions(tokens.shape))


def noised(model: Words) -> Words:
    """A hook adds noise to what the embedding gives, as NEFTune does."""
    model.embed.register_forward_hook(lambda _module, _args, out: out + 0.1 * torch.rand_like(out))
    return model


class Direct(Words):
    """The weight of the embedding is used as it is."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        del self.head

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.embedded(tokens))
        return F.cross_entropy(F.linear(hidden, self.embed.weight).flatten(0, -2), targets.flatten())


class Twice(Words):
    """An encoder and a decoder, both of which embed, and a head, all with one weight."""

    def __init__(self) -> None:
        super().__init__(noise=0.1, bias=True)
        self.decoder = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = self.hidden(self.embedded(tokens)).mean(1, keepdim=True)
        x = self.embedded(targets) + found
        for layer in self.decoder:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


class Again(nn.Module):
    """The same layers used again after something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(Layer() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
            x = self.between(x)
        return x


def frozen(model: Words) -> Words:
    model.embed.requires_grad_(False)
    return model


def bfloat16(make: Callable[[], nn.Module]) -> nn.Module:
    return make().to(torch.bfloat16)


def words() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, VOCABULARY, (2, 6)), torch.randint(0, VOCABULARY, (2, 6))


WORDY: dict[str, Model] = {
    "tied": Model(Words, words),
    "untied": Model(lambda: Words(tied=False, bias=True), words),
    "noisy": Model(lambda: Words(noise=0.1, padding=0), words),
    "autocast": Model(lambda: Words(noise=0.1), words, autocast=True),
    "positions": Model(Positions, words),
    "shaped": Model(Shaped, words),
    "noised": Model(lambda: noised(Words()), words),
    "direct": Model(Direct, words),
    "twice": Model(Twice, words),
    "frozen": Model(lambda: frozen(Words(tied=False)), words),
    "frozen_tied": Model(lambda: frozen(Words()), words),
    "again": Model(Again, lambda: (torch.randn(3, WIDTH),)),
}
