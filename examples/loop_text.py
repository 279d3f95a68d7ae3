"""Train a character LSTM by backpropagation through 100,000 time steps of text, without truncation.

    python examples/loop_text.py                      # Python's standard library as text, 64 MiB
    python examples/loop_text.py --budget 4MiB --steps 1000000

The whole text is one loop of single-character steps; each training step differentiates through all of it. Writes a
picture of the loss and of how far back in time the last prediction looks. Needs tapestream[plots].
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.models import load_bytes, standard_library_bytes

matplotlib.use("Agg")
from matplotlib import pyplot

State = tuple[Tensor, Tensor]


class Reader(nn.Module):
    """One character at a time: its embedding into an LSTM cell, and the loss of predicting the next one."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, characters)

    def forward(self, state: State, pair: Tensor) -> tuple[State, Tensor]:
        """``pair``: this character and the next, for each of the texts read side by side, shape (texts, 2)."""
        h, c = self.cell(self.embedding(pair[:, 0]), state)
        return (h, c), nn.functional.cross_entropy(self.head(h), pair[:, 1])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train as the command line says; returns the losses."""
    given = parser().parse_args(arguments)
    torch.manual_seed(0)
    pairs, characters = text_of(given.data, given.texts, given.steps)
    reader = Reader(characters, given.width)
    read = ts.Loop(reader, budget=given.budget)
    optimizer = torch.optim.Adam(reader.parameters(), lr=given.lr)
    losses: list[float] = []
    for epoch in range(given.epochs):
        start = torch.zeros(given.texts, given.width)
        began = time.perf_counter()
        _, total = read((start, start), inputs=pairs, outputs="sum")
        loss = total / given.steps
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - began
        print(f"epoch {epoch + 1}/{given.epochs}  loss {losses[-1]:.3f}  {seconds:.1f} s", flush=True)
    print(read.plan)
    draw(losses, memory_of(reader, pairs, given), given.out)
    return losses


def text_of(data: Path | None, texts: int, steps: int) -> tuple[Tensor, int]:
    """``texts`` pieces of text as pairs of characters, shape (steps, texts, 2), and the size of the alphabet."""
    found = standard_library_bytes() if data is None else load_bytes(data)
    alphabet, codes = torch.unique(found[: texts * (steps + 1)].long(), return_inverse=True)
    rows = codes.view(texts, steps + 1).t()
    return torch.stack((rows[:-1], rows[1:]), dim=-1), len(alphabet)


def memory_of(reader: Reader, pairs: Tensor, given: argparse.Namespace) -> list[float]:
    """How much the last loss depends on each earlier state: norms of its gradient, one per step back."""
    back = min(200, given.steps)
    starts: list[Tensor] = []
    state = (torch.zeros(given.texts, given.width), torch.zeros(given.texts, given.width))
    for pair in pairs[-back:]:
        state = (state[0].requires_grad_(), state[1].requires_grad_()) if not starts else state
        starts.append(state[1])
        state, loss = reader(state, pair)
    found = torch.autograd.grad(loss, starts)
    return [float(g.norm()) for g in reversed(found)]


def draw(losses: list[float], reach: list[float], out: Path) -> None:
    """Loss by epoch, and the gradient's norm by steps back."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, marker="o")
    left.set(xlabel="epoch", ylabel="loss per character (nats)")
    left.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    right.semilogy(reach)
    right.set(xlabel="steps back", ylabel="gradient of the last loss")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "loop_text.png", dpi=120)
    pyplot.close(figure)
    print(f"written: {out / 'loop_text.png'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, help="a text file, or a folder of them")
    made.add_argument("--out", type=Path, default=Path("runs"), help="where the picture goes (%(default)s)")
    made.add_argument("--budget", default="64MiB", help="bytes for restart checkpoints and tape (%(default)s)")
    for name, value in {"steps": 100_000, "texts": 8, "width": 64, "epochs": 5}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    made.add_argument("--lr", type=float, default=1e-2, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
