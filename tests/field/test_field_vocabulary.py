"""Tables of words that grow or shrink: before the model is streamed, between two streams, and meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, HOMES, WIDTH, sgd, trained
from exact import Trace, assert_same
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import TapestreamError

WORDS = 20


class Words(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        if tied:
            self.head.weight = self.table.weight
        self.tied = tied

    def resize(self, count: int) -> None:
        """As libraries do: new modules with the old rows in them."""
        table, head = nn.Embedding(count, WIDTH), nn.Linear(WIDTH, count, bias=False)
        kept = min(count, len(self.table.weight))
        with torch.no_grad():
            table.weight[:kept] = self.table.weight[:kept]
            head.weight[:kept] = self.head.weight[:kept]
        if self.tied:
            head.weight = table.weight
        self.table, self.head = table, head

    def forward(self, numbers: torch.Tensor) -> Any:
        x = self.table(numbers)
        for block in self.blocks:
            x = block(x) + x
        return F.cross_entropy(self.head(x), numbers.roll(1))


def loss(model: Any, number: int) -> Any:
    """Of all words there are."""
    count = len(model.table.weight)
    return model(torch.randint(count, (8,), generator=torch.Generator().manual_seed(number)))


def streamed(model: Any, home: str, folder: Path) -> Any:
    below: dict[str, Any] = {"folder": folder} if home == "disk" else {}
    return ts.stream(model, device="cpu", budget=AMPLE, home=home, **below)


def plainly(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [WORDS + 7, WORDS - 6])
def test_between_two_streams(count: int, tied: bool, home: str, tmp_path: Path) -> None:
    """Trained, undone, resized, streamed again with another optimizer."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Words(tied)
        trace = trained(
            streamed(model, home, tmp_path / "a") if ours else model, (sgd if ours else plainly)(model), loss
        )
        if ours:
            ts.unstream(model)
        torch.manual_seed(1)
        model.resize(count)
        then: Trace = trained(
            streamed(model, home, tmp_path / "b") if ours else model, (sgd if ours else plainly)(model), loss
        )
        if ours:
            ts.unstream(model)
        found.append(trace | {f"then {name}": t for name, t in then.items()})
    assert_same(*found)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("home", HOMES)
def test_meanwhile(home: str, tied: bool, tmp_path: Path) -> None:
    """Tables lie outside of blocks. With an optimizer made anew it is plain PyTorch's training, or refused by name; the
    model goes on where it is undone first."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Words(tied)
        if ours:
            streamed(model, home, tmp_path / "a")
        trained(model, (sgd if ours else plainly)(model), loss)
        torch.manual_seed(1)
        try:
            model.resize(WORDS + 3)
            found.append(trained(model, (sgd if ours else plainly)(model), loss))
        except TapestreamError as error:
            assert "unstream" in str(error) or "ts.stream" in str(error)  # noqa: PT017
            found.append(found[0])
        if ours:
            ts.unstream(model)
    assert_same(*found)
