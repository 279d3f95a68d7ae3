"""Losses of more than the last result, which the model makes: of its first columns, of results on the way, of several
heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import WIDTH, assert_exact, rows
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")

SIZES = (4, 8, WIDTH)
Loss = Callable[[Any, list[torch.Tensor], torch.Tensor], Any]


def first_columns(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    pairs = zip(model.heads, SIZES, strict=True)
    return sum(F.cross_entropy(head(states[-1][:, :size]), wanted) for head, size in pairs)


def shared_head(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    """One head, of whose weight the first columns are used."""
    weight, bias = model.head.weight, model.head.bias
    return sum(F.cross_entropy(F.linear(states[-1][:, :n], weight[:, :n], bias), wanted) for n in SIZES)


def pairs_of_rows(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    """Each with each, as for embeddings, by so many columns."""
    found = [F.normalize(states[-1][:, :size], dim=1) for size in SIZES]
    return sum(F.cross_entropy(one[:4] @ one[4:].T * 5, torch.arange(4)) for one in found)


def several_depths(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    return sum(F.cross_entropy(model.head(state), wanted) for state in states[2::2])


def depths_and_columns(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    heads = [(head, head.in_features) for head in model.heads]
    return sum(F.cross_entropy(head(state[:, :size]), wanted) for state in states[-3:] for head, size in heads)


def taught_by_the_last(model: Any, states: list[torch.Tensor], wanted: torch.Tensor) -> Any:
    taught = F.log_softmax(model.head(states[2]), 1)
    teacher = F.softmax(model.head(states[-1]).detach(), 1)
    return F.kl_div(taught, teacher, reduction="batchmean") + first_columns(model, states, wanted)


LOSSES: tuple[Loss, ...] = (
    first_columns, shared_head, pairs_of_rows, several_depths, depths_and_columns, taught_by_the_last,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(size, 6) for size in SIZES)
        self.head, self.loss = nn.Linear(WIDTH, 6), loss

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> Any:
        states = [self.first(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.loss(self, states, wanted)


def of_a_batch(model: Any, number: int) -> Any:
    return model(rows(number), torch.randint(6, (8,), generator=torch.Generator().manual_seed(number)))


def of_two_batches(model: Any, number: int) -> Any:
    """Both go through the model before the backward."""
    return of_a_batch(model, number) + of_a_batch(model, number + 7)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_exact_within_the_budget(loss: Loss, tmp_path: Path) -> None:
    assert_exact(lambda: Net(loss), tmp_path, loss=of_a_batch)


@pytest.mark.parametrize("loss", [first_columns])
def test_two_batches(loss: Loss, tmp_path: Path) -> None:
    assert_exact(lambda: Net(loss), tmp_path, loss=of_two_batches)
