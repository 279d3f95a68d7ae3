"""The networks that are measured: all have the shape ``after(blocks(before(x)))``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.models import GPT, GPTConfig


class Network(nn.Module):
    """``after(blocks(before(x)))`` and the mean cross-entropy against ``targets``.

    ``run_blocks`` may be replaced by another way to run the same blocks (a `ts.Chain`, PyTorch's checkpointing).
    """

    def __init__(self, before: nn.Module, blocks: list[nn.Module], after: nn.Module) -> None:
        super().__init__()
        self.before, self.blocks, self.after = before, nn.ModuleList(blocks), after

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar."""
        return self.loss(x, targets, self.run_blocks)

    def loss(self, x: Tensor, targets: Tensor, run_blocks: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss with the blocks run by ``run_blocks``."""
        logits: Tensor = self.after(run_blocks(self.before(x)))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def run_blocks(self, x: Tensor) -> Tensor:
        """One after the other, everything stored."""
        for block in self.blocks:
            x = block(x)
        return x


class Embedding(nn.Module):
    """Tokens (batch, sequence) to (batch, sequence, width)."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding) -> None:
        super().__init__()
        self.token, self.position = token, position

    def forward(self, tokens: Tensor) -> Tensor:
        """Sum of the token's and the position's vector."""
        found: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        return found


class Residual(nn.Module):
    """A basic block of He et al. 2016 for CIFAR: two 3x3 convolutions with BatchNorm, shortcut without parameters."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.stride, self.more = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        shortcut = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        if self.more:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.more))
        return F.relu(self.second(self.first(x)) + shortcut)


class Bottleneck(nn.Module):
    """A bottleneck block of He et al. 2016, stride in the 3x3 convolution, projection where the shape changes."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.inside = nn.Sequential(
            *_normed(before, inner, 1), nn.ReLU(inplace=True),
            *_normed(inner, inner, 3, stride), nn.ReLU(inplace=True), *_normed(inner, after, 1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if before == after else nn.Sequential(*_normed(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, width) to (batch, 4 inner, height / stride, width / stride)."""
        return F.relu(self.inside(x) + self.shortcut(x), inplace=True)


def _normed(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)]


@dataclass(frozen=True, slots=True)
class Case:
    """A network with its batch. Every ``network()`` has the same bits."""

    name: str
    make: Callable[[], Network]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    device: str = "cpu"

    def network(self) -> Network:
        """A new one, on the device."""
        torch.manual_seed(0)
        return self.make().to(self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, on the device."""
        torch.manual_seed(1)
        x, targets = self.make_batch()
        return x.to(self.device), targets.to(self.device)


def gpt_network(layers: int, width: int, context: int, heads: int = 8) -> Network:
    """A byte-level GPT, embedding and head outside the blocks."""
    model = GPT(GPTConfig(layers, width, heads, vocabulary=256, context=context, tied=False))
    return Network(Embedding(model.token, model.position), list(model.blocks), nn.Sequential(model.norm, model.head))


def gpt(layers: int, width: int, batch: int, sequence: int, device: str) -> Case:
    """A byte-level GPT on random bytes."""

    def tokens() -> tuple[Tensor, Tensor]:
        return torch.randint(256, (batch, sequence)), torch.randint(256, (batch, sequence))

    name = f"GPT, {layers} blocks of width {width}, {batch} x {sequence} tokens"
    return Case(name, lambda: gpt_network(layers, width, sequence), tokens, device)


def resnet(blocks_per_size: int, batch: int, device: str) -> Case:
    """CIFAR ResNet-(6 m + 2), 3 m basic blocks; m = 18 is ResNet-110."""
    widths = [16] * blocks_per_size + [32] * blocks_per_size + [64] * blocks_per_size

    def network() -> Network:
        blocks: list[nn.Module] = [
            Residual(before, after, 1 if before == after else 2)
            for before, after in zip([16, *widths[:-1]], widths, strict=True)
        ]
        stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        return Network(stem, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)))

    return Case(f"ResNet-{6 * blocks_per_size + 2}, batch {batch}", network, _images(batch, 32), device)


def imagenet_resnet(blocks: Sequence[int], width: int, batch: int, size: int, device: str) -> Case:
    """A ResNet of bottleneck blocks; (3, 8, 36, 3) of width 64 is ResNet-152."""

    def network() -> Network:
        found: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            for place in range(count):
                found.append(Bottleneck(before, width << stage, 2 if stage and not place else 1))
                before = 4 * width << stage
        stem = nn.Sequential(*_normed(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        return Network(stem, found, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)))

    name = f"ResNet-{3 * sum(blocks) + 2}, {batch} images of {size} x {size}"
    return Case(name, network, _images(batch, size), device)


def pyramid(batch: int, size: int, device: str) -> Case:
    """An uneven chain: convolutions that narrow and widen, pooling now and then; states and times differ by stage."""
    plan = (32, 64, 64, "pool", 128, 32, 128, "pool", 256, 64, 256, 64, "pool", 512, 128, 512)

    def network() -> Network:
        blocks: list[nn.Module] = []
        width = 16
        for item in plan:
            if isinstance(item, int):
                blocks.append(nn.Sequential(nn.Conv2d(width, item, 3, padding=1), nn.GELU()))
                width = item
            else:
                blocks.append(nn.MaxPool2d(2))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
        return Network(nn.Conv2d(3, 16, 3, padding=1), blocks, head)

    return Case(f"uneven convolutions, {len(plan)} stages, batch {batch}", network, _images(batch, size), device)


def tiny_mlp(stages: int, batch: int, device: str) -> Case:
    """Stages so small that what surrounds them is most of the time: the least favourable case."""

    def network() -> Network:
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(stages)]
        return Network(nn.Identity(), blocks, nn.Linear(64, 10))

    def batch_of() -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 64), torch.randint(10, (batch,))

    return Case(f"MLP, {stages} stages of 64 x 64, batch {batch}", network, batch_of, device)


def _images(batch: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))
