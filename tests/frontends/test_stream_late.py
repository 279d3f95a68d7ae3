"""Gradients of an embedding before the blocks are made when all tapes are gone: with all in one memory, their room is
the first block's until then, unless something else makes them earlier."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from least import SMALL, least_and_measured
from streamable import Chained, Dense
from torch import nn

import tapestream as ts

WORDS, WIDTH = 8192, 64
EMBEDDING_NBYTES = WORDS * WIDTH * 4


class Tied(Chained):
    """The embedding's weight is a head's, too: its gradient begins at the head."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) @ self.before.weight[:16].T


class Returned(Chained):
    """What the embedding gives is used after the blocks, too."""

    def forward(self, x: Any) -> Any:
        return super().forward(x), self.before(x[:1, :1])


def tokens() -> torch.Tensor:
    return torch.randint(0, WORDS, (64, 256))


def made(kind: type[Chained], budget: int, *, frozen: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Dense(WIDTH) for _ in range(4)]
    model = kind(blocks, nn.Embedding(WORDS, WIDTH))
    if frozen:
        model.blocks.requires_grad_(False)
    ts.stream(model, device="cpu", budget=budget, home="device")
    return model, ts.optimizer(model, torch.optim.SGD, lr=1e-3, fused=True)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return sum((t.sum() for t in found), torch.zeros(())) if isinstance(found, tuple) else found.sum()


@pytest.mark.parametrize("kind", [Chained, Tied, Returned])
def test_the_least_budget_is_kept_and_counts_the_embedding_where_it_is_early(kind: type[Chained]) -> None:
    torch.set_num_threads(1)
    x = tokens()
    least, measured = least_and_measured(
        lambda budget: made(kind, budget), lambda model: loss_of(model, x).backward(), 2**16
    )
    assert measured <= least + SMALL
    if kind is Returned:  # but for that it needs what the chained one does
        chained, _ = made(Chained, 2**16)
        with pytest.raises(ts.BudgetError) as refused:
            loss_of(chained, x)
        assert refused.value.least_nbytes is not None
        assert refused.value.least_nbytes + EMBEDDING_NBYTES * 7 / 8 <= least


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_that_is_there_already_is_planned_beside(frozen: bool) -> None:
    x = tokens()
    torch.set_num_threads(1)

    def refused(call: Callable[[], Any]) -> int:
        with pytest.raises(ts.BudgetError) as error:
            call()
        assert error.value.least_nbytes is not None
        return error.value.least_nbytes

    model, _ = made(Chained, 2**16, frozen=frozen)
    least = refused(lambda: model(x))
    ts.unstream(model)
    model, optimizer = made(Chained, least, frozen=frozen)
    loss_of(model, x).backward()
    assert refused(lambda: model(x)) >= least + EMBEDDING_NBYTES
    optimizer.zero_grad()
    loss_of(model, x).backward()
    ts.unstream(model)
