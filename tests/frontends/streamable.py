"""Small models of blocks, each with a way in which streaming could go wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from argued import (
    Cached,
    Crossed,
    Dropping,
    FixedCache,
    PackedOutputs,
    Routed,
    ScaledByParameter,
    SharedBias,
    Skipping,
    Watched,
)  # fmt: skip
from models import Adapted, Attention, Down, Mixer, Noisy, Recurrent, Residual, Up, old_style, whole
from torch import nn

from tapestream.models.gpt import GPT, GPTConfig

WIDTH = 16


class Chained(nn.Module):
    """Something before, blocks one after the other, something after."""

    def __init__(
        self, blocks: list[nn.Module], before: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.before, self.after = before or nn.Identity(), after or nn.Identity()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class Dense(nn.Module):
    """A block of one linear map, of at least a page of bytes."""

    def __init__(self, width: int = WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Stacked(Chained):
    """Recurrent layers: the state is (sequence, cells of all layers)."""

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = (self.before(x), [])
        for block in self.blocks:
            state = block(state)
        return self.after(state[0]), state[1]


class Hourglass(Chained):
    """The state carries the skips."""

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = {"x": self.before(x), "skips": ()}
        for block in self.blocks:
            state = block(state)
        return self.after(state["x"])


class TwoChains(nn.Module):
    """An encoder and a decoder; the decoder starts from a sum that is made in place, which parts chains."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Dense() for _ in range(4))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.ModuleList(Dense() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.encoder:
            y = block(y)
        y = self.between(y).add_(x)
        for block in self.decoder:
            y = block(y)
        return y


class Positioned(Chained):
    """Adds something to the state between blocks, in place for every third one."""

    def __init__(self, blocks: list[nn.Module], *, in_place: bool) -> None:
        super().__init__(blocks)
        self.position, self.in_place = nn.Parameter(torch.randn(WIDTH) / 4), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            if k % 3 == 2:
                x = x.add_(self.position) if self.in_place else x + self.position
            x = block(x)
        return x


class MaskedBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = Attention(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.inner(x) * mask * scale


class Masked(Chained):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask, scale=0.5)
        return x


class Scaled(Chained):
    """Hands every block a parameter of the model's own."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class Tied(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.linear.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.norm(self.linear(x)))


def dense(count: int = 6) -> list[nn.Module]:
    return [Dense() for _ in range(count)]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))


def tied_blocks() -> list[nn.Module]:
    blocks: list[nn.Module] = [Dense() for _ in range(6)]
    blocks[2], blocks[5] = Tied(blocks[0].linear), Tied(blocks[0].linear)
    return blocks


def repeated_blocks() -> list[nn.Module]:
    one, two = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()), Dense()
    return [one, one, two, one, Dense(), two]


def spectral() -> list[nn.Module]:
    from torch.nn.utils import parametrizations, spectral_norm

    return [
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) if k % 2
        else nn.Sequential(old_style(spectral_norm, nn.Linear(WIDTH, WIDTH)), nn.Tanh())
        for k in range(4)
    ]  # fmt: skip


def freeze(model: Chained, which: Callable[[int], bool]) -> Chained:
    for k, block in enumerate(model.blocks):
        if which(k):
            block.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Model:
    """``make`` builds it (under a fixed seed), ``batch`` the arguments of one call."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    autocast: bool = False
    lr: float = 0.05

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make()


def loss_of(result: Any) -> torch.Tensor:
    return whole(result)


def numbers(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 17, (2, 8)), torch.randint(0, 17, (2, 8))


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(4, WIDTH, 2, vocabulary=17, context=8, **options))


MODELS: dict[str, Model] = {
    "gpt": Model(lambda: gpt(dropout=0.1), tokens),
    "gpt_autocast": Model(lambda: gpt(dropout=0.1), tokens, autocast=True),
    "gpt_bf16": Model(lambda: gpt(dtype=torch.bfloat16), tokens),
    "resnet": Model(
        lambda: Chained([Residual(4) for _ in range(4)], nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2)),
        numbers(2, 3, 6, 6),
    ),
    "sequential": Model(
        lambda: nn.Sequential(*(normalised() for _ in range(5))), numbers(4, WIDTH)
    ),
    "lstm": Model(lambda: Stacked([Recurrent(8) for _ in range(4)]), numbers(2, 5, 8)),
    "unet": Model(lambda: Hourglass([*(Down(4) for _ in range(3)), *(Up(4) for _ in range(3))]), numbers(2, 4, 8)),
    "mixer": Model(lambda: Chained([Mixer(6, WIDTH) for _ in range(4)]), numbers(2, 6, WIDTH)),
    "spectral": Model(lambda: Chained(spectral()), numbers(3, WIDTH)),
    "noisy": Model(lambda: Chained([Noisy(WIDTH) for _ in range(5)]), numbers(3, WIDTH)),
    "tied": Model(lambda: Chained(tied_blocks()), numbers(3, WIDTH)),
    "tied_autocast": Model(lambda: Chained(tied_blocks()), numbers(3, WIDTH), autocast=True),
    "repeated": Model(lambda: Chained(repeated_blocks()), numbers(3, WIDTH)),
    "frozen_all": Model(lambda: freeze(Chained(dense(), nn.Linear(WIDTH, WIDTH)), lambda k: True), numbers(3, WIDTH)),
    "frozen_some": Model(lambda: freeze(Chained(dense(), nn.Linear(WIDTH, WIDTH)), lambda k: k % 2 == 0), numbers(3,
    WIDTH)),
    "frozen_first": Model(lambda: freeze(Chained(dense()), lambda k: k < 3), numbers(3, WIDTH)),
    "frozen_last": Model(lambda: freeze(Chained(dense()), lambda k: k >= 3), numbers(3, WIDTH)),
    "adapters": Model(lambda: Chained([Adapted(WIDTH) for _ in range(4)]), numbers(3, WIDTH)),
    "two_chains": Model(TwoChains, numbers(3, WIDTH)),
    "positioned": Model(lambda: Positioned(dense(), in_place=False), numbers(3, WIDTH)),
    "masked": Model(
        lambda: Masked([MaskedBlock() for _ in range(4)]),
        lambda: (torch.randn(2, 6, WIDTH), torch.rand(2, 6, 1).round()),
    ),
    "crossed": Model(Crossed, lambda: (torch.randn(3, WIDTH), torch.randn(3, WIDTH))),
    "scaled": Model(ScaledByParameter, numbers(3, WIDTH)),
    "shared_bias": Model(SharedBias, numbers(3, WIDTH)),
    "routed": Model(Routed, numbers(3, WIDTH)),
    "packed": Model(PackedOutputs, numbers(3, WIDTH)),
    "cached": Model(Cached, numbers(3, WIDTH)),
    "fixed_cache": Model(FixedCache, numbers(3, WIDTH)),
    "skipping": Model(Skipping, numbers(3, WIDTH)),
    "watched": Model(Watched, numbers(3, WIDTH)),
    "dropping": Model(Dropping, numbers(3, WIDTH)),
    "double": Model(lambda: Chained(dense()).double(), lambda: (torch.randn(3, WIDTH, dtype=torch.float64),)),
}  # fmt: skip
