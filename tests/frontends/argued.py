"""Models whose blocks take and give more than one tensor: what Hugging Face's layers do, each kind made small."""

import random
from dataclasses import dataclass

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

WIDTH = 16


class Layers(nn.Module):
    """Blocks of one class."""

    def __init__(self, block: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))


class Linears(nn.Module):
    """A block of two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class CrossBlock(Linears):
    """Uses what the encoder gave twice, so that the order of sums shows."""

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + y if memory is None else x + torch.sigmoid(self.down(memory)) * memory + y


class Crossed(nn.Module):
    """An encoder and a decoder, each of whose blocks sees the encoder's output; keyword arguments only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(CrossBlock() for _ in range(3))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            x = block(x=x)
        memory = self.norm(x)
        for block in self.decoder:
            y = block(x=y, memory=memory)
        return y


class ScaledBlock(Linears):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x) * scale + self.down(x * scale))


class ScaledByParameter(Layers):
    """Hands every block a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__(ScaledBlock)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class BiasBlock(Linears):
    """The first block makes a bias of its parameters; every block uses it twice, and returns it."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, None]:
        if bias is None:
            bias = torch.sin(self.down.weight.sum(0))
        return torch.tanh(self.up(x) + bias) * bias, bias, None


class SharedBias(Layers):
    """T5's relative position bias."""

    def __init__(self) -> None:
        super().__init__(BiasBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for block in self.blocks:
            x, bias, _ = block(x, bias)
        return x


class RoutedBlock(Linears):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.down(x)
        return {"x": torch.tanh(self.up(x)) * scores.softmax(-1) * mask, "scores": scores}


class Routed(Layers):
    """Every block gives scores too, and all of them enter the result: a router's auxiliary loss."""

    def __init__(self) -> None:
        super().__init__(RoutedBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = []
        mask = torch.ones(x.shape[0], 1, device=x.device)
        for block in self.blocks:
            out = block(x, mask)
            x = out["x"]
            scores.append(out["scores"])
        return x + torch.stack(scores).square().mean(0)


@dataclass
class Packed:
    """A dataclass as result, as Hugging Face's model outputs are."""

    x: torch.Tensor
    extra: torch.Tensor


pytree.register_dataclass(Packed)


class PackedBlock(Linears):
    def forward(self, x: torch.Tensor) -> Packed:
        return Packed(torch.relu_(self.up(x)) + x, self.down(x).detach())


class PackedOutputs(Layers):
    def __init__(self) -> None:
        super().__init__(PackedBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).x
        return x


class Memory:
    """A key-value cache that grows."""

    def __init__(self) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.length = 0

    def add(self, layer: int, key: torch.Tensor) -> torch.Tensor:
        self.keys.setdefault(layer, []).append(key)
        self.length += 1
        return torch.cat(self.keys[layer])


class CachedBlock(Linears):
    def forward(self, x: torch.Tensor, layer: int, memory: Memory) -> torch.Tensor:
        keys = memory.add(layer, self.down(x))
        return torch.tanh(self.up(x) + keys.mean(0) / memory.length)


class Cached(Layers):
    """Each block appends to a cache that the model made."""

    def __init__(self) -> None:
        super().__init__(CachedBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = Memory()
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, memory=memory)
        assert memory.length == len(self.blocks) == len(memory.keys)
        return x


class FixedCacheBlock(Linears):
    """Writes into a cache of fixed size, and counts in it."""

    def forward(self, x: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            memory["kept"].mul_(0.5).add_(self.down(x).detach())
            memory["count"].add_(1)
        return torch.tanh(self.up(x)) + memory["kept"].clone() * memory["count"].item()


class FixedCache(Layers):
    def __init__(self) -> None:
        super().__init__(FixedCacheBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = _Box({"kept": torch.ones_like(x), "count": torch.zeros(())})
        for block in self.blocks:
            x = block(x, memory)
        return x * memory["count"]


class _Box(dict[str, torch.Tensor]):
    """A container that no pytree opens."""


class SkipBlock(Linears):
    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return y if skip is None else y + self.down(skip)


class Skipping(Layers):
    """The second half gets outputs of the first as second argument."""

    def __init__(self) -> None:
        super().__init__(SkipBlock, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        for block in self.blocks[3:]:
            x = block(x, skips.pop())
        return x


class WatchedBlock(Linears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Watched(Layers):
    """An auxiliary loss on activations inside the blocks, got by hooks."""

    def __init__(self) -> None:
        super().__init__(WatchedBlock)
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(Seen(self.seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        for block in self.blocks:
            x = block(x)
        assert len(self.seen) == len(self.blocks)
        return x + torch.stack(self.seen).square().mean(0)


class Seen:
    """A hook that keeps what it sees."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        self.seen = seen

    def __call__(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        self.seen.append(output)


class Dropping(Layers):
    """Drops layers at random, by three generators."""

    def __init__(self) -> None:
        super().__init__(WatchedBlock, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            draws = (random.random, numpy.random.random, lambda: torch.rand(()).item())
            if self.training and draws[number % 3]() < 0.5:
                continue
            x = block(x)
        return x
