"""Learn the hyperparameters of a training run by differentiating through all of its 100,000 SGD steps.

    python examples/loop_hypergradient.py             # 100,000 steps of SGD, 10 outer rounds
    python examples/loop_hypergradient.py --steps 2000 --rounds 5

A logistic regression on few examples, most of whose features are noise, is trained by SGD with momentum. Learning rate,
momentum and a weight decay for every feature are learned by the gradient of the loss on other examples, exact through
every step: nothing is truncated or approximated. The decays rise on the features that are noise. Writes a picture.
Needs tapestream[plots].
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import tapestream as ts

matplotlib.use("Agg")
from matplotlib import pyplot

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Examples:
    """Features of shape (examples, features) and labels 0 or 1."""

    x: Tensor
    y: Tensor

    @classmethod
    def drawn(cls, count: int, features: int, seed: int) -> "Examples":
        """The first half of the features says something, the other half nothing."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, features, generator=generator)
        truth = torch.linspace(2.0, 0.5, features) * (torch.arange(features) < features // 2)
        return cls(x, (torch.rand(count, generator=generator) < torch.sigmoid(x @ truth)).float())

    def loss(self, weights: Tensor) -> Tensor:
        """The mean cross entropy."""
        return nn.functional.binary_cross_entropy_with_logits(self.x @ weights, self.y)


class Hyper(nn.Module):
    """What is learned outside: logarithms of the learning rate and of the decays, momentum as a logit."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.01).log())
        self.momentum = nn.Parameter(torch.tensor(0.5).logit())
        self.decay = nn.Parameter(torch.full((features,), 0.01).log())


def sgd(hyper: Hyper, train: Examples) -> Callable[[State, Tensor], State]:
    """A step of SGD on the examples of the given numbers. The gradient of the logistic loss is written out."""
    # Computed once, before the loop: gradients reach the parameters behind all the same.
    rate, momentum, decay = hyper.rate.exp(), hyper.momentum.sigmoid(), hyper.decay.exp()

    def step(state: State, numbers: Tensor) -> State:
        weights, speed = state
        x, y = train.x[numbers], train.y[numbers]
        gradient = x.T @ (torch.sigmoid(x @ weights) - y) / len(numbers) + decay * weights
        speed = momentum * speed - rate * gradient
        return weights + speed, speed

    return step


def batches(steps: int, size: int, count: int) -> Tensor:
    """Numbers of the examples of each step's batch, shape (steps, size)."""
    return torch.randint(count, (steps, size), generator=torch.Generator().manual_seed(3))


def main(arguments: list[str] | None = None) -> list[float]:
    """Learn as the command line says; returns the losses on the other examples, by round."""
    given = parser().parse_args(arguments)
    train, other = Examples.drawn(given.examples, given.features, 1), Examples.drawn(1000, given.features, 2)
    numbers = batches(given.steps, given.batch, given.examples)
    hyper = Hyper(given.features)
    optimizer = torch.optim.Adam(hyper.parameters(), lr=given.lr)
    losses: list[float] = []
    for round_ in range(given.rounds):
        began, still = time.perf_counter(), torch.zeros(given.features)
        weights, _ = ts.Loop(sgd(hyper, train), budget=given.budget)((still, still.clone()), inputs=numbers)
        loss = other.loss(weights)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - began
        print(
            f"round {round_ + 1}/{given.rounds}  loss {losses[-1]:.4f}  rate {hyper.rate.exp().item():.4f}  "
            f"momentum {hyper.momentum.sigmoid().item():.2f}  {seconds:.1f} s", flush=True,
        )  # fmt: skip
    draw(hyper, losses, given.out)
    return losses


def draw(hyper: Hyper, losses: list[float], out: Path) -> None:
    """The loss by round, and the decay of every feature."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    axes[0].plot(range(1, len(losses) + 1), losses)
    axes[0].set(xlabel="round", ylabel="loss on other examples")
    axes[0].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    decay = hyper.decay.detach().exp().numpy()
    half = len(decay) // 2
    axes[1].bar(range(half), decay[:half], label="says something")
    axes[1].bar(range(half, len(decay)), decay[half:], label="noise")
    axes[1].set(xlabel="feature", ylabel="weight decay learned", yscale="log")
    axes[1].legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "loop_hypergradient.png", dpi=120)
    pyplot.close(figure)
    print(f"written: {out / 'loop_hypergradient.png'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("runs"), help="where the picture goes (%(default)s)")
    made.add_argument("--budget", default="4MiB", help="bytes for restart checkpoints and tape (%(default)s)")
    made.add_argument("--lr", type=float, default=0.3, help="of the outer rounds (%(default)s)")
    sizes = {"steps": 100_000, "examples": 60, "features": 20, "batch": 16, "rounds": 10}
    for name, value in sizes.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
