"""Train two towers of unequal depth against one contrastive loss, in memory that they share.

    python examples/two_towers.py                      # 16 layers for pictures, 4 for captions
    python examples/two_towers.py --budget 4MiB --batch 256 --steps 200

Each pair is a noisy picture of a pattern and a caption, some numbers that name it; the towers learn to give both the
same vector. Storing everything takes the activations of both towers; within a budget, tapestream keeps what saves most
time, in whichever tower it is, and recomputes the rest. The losses are those of plain PyTorch, bit for bit.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tapestream as ts


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.outer(F.gelu(self.inner(self.norm(x)))), 0.1, self.training)


class Contrast(nn.Module):
    """Each picture should be nearest to its own caption, and each caption to its own picture."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures: Tensor, captions: Tensor) -> Tensor:
        near = F.normalize(pictures) @ F.normalize(captions).T * self.log_scale.exp()
        own = torch.arange(len(near))
        return (F.cross_entropy(near, own) + F.cross_entropy(near.T, own)) / 2


def main(arguments: list[str] | None = None) -> list[float]:
    """Train as the command line says; returns the losses."""
    given = parser().parse_args(arguments)
    torch.manual_seed(0)
    pictures, captions, head = tower(64, given.width, given.pictures), tower(8, given.width, given.captions), Contrast()
    net = ts.Join([pictures, captions], head, budget=given.budget)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for step, (seen, said) in enumerate(pairs(given.steps, given.batch)):
        loss = net(seen, said)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == given.steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    print(net.plan)
    return losses


def tower(size: int, width: int, layers: int) -> list[nn.Module]:
    """From vectors of so many numbers to one vector of 32."""
    return [nn.Linear(size, width), *(Block(width) for _ in range(layers)), nn.Linear(width, 32)]


def pairs(steps: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    """For each step: noisy pictures (batch, 64) of patterns, and captions (batch, 8) that name them."""
    painted = torch.randn(8, 64)
    said = torch.randn(steps, batch, 8)
    seen = torch.tanh(said @ painted) + 0.3 * torch.randn(steps, batch, 64)
    return list(zip(seen, said, strict=True))


def parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--budget", default="6MiB", help="bytes for both towers' activations (default: %(default)s)")
    options.add_argument("--pictures", type=int, default=16, help="layers of the tower for pictures (%(default)s)")
    options.add_argument("--captions", type=int, default=4, help="layers of the tower for captions (%(default)s)")
    options.add_argument("--width", type=int, default=64, help="width of the layers (%(default)s)")
    options.add_argument("--batch", type=int, default=128, help="pairs in a step (%(default)s)")
    options.add_argument("--steps", type=int, default=100, help="steps (%(default)s)")
    return options


if __name__ == "__main__":
    main()
