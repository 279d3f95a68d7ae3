"""Sparse tensors of other layouts, and gradients that are sparse, in blocks: exact at the least budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import HOMES, WIDTH, assert_exact, rows
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import BudgetError

pytestmark = [
    pytest.mark.on_cpu("bytes of the CPU are measured"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.sparse:UserWarning"),
]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) > 0.7).float())
        self.register_buffer("edges", torch.randint(8, (2, 20)))
        self.weights = nn.Parameter(torch.rand(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "a graph":
                graph = torch.sparse_coo_tensor(self.edges, self.weights, (len(x), len(x)))
                made = torch.sparse.mm(graph, self.linear(x))
            case "a softmax of a graph":
                graph = torch.sparse_coo_tensor(self.edges, self.weights, (len(x), len(x))).coalesce()
                made = torch.sparse.mm(torch.sparse.softmax(graph, 1), self.linear(x))
            case "a mask that stays":
                made = F.linear(x, self.linear.weight * self.mask, self.linear.bias)
            case "made dense again":
                graph = torch.sparse_coo_tensor(self.edges, self.weights, (len(x), len(x)))
                made = graph.to_dense() @ self.linear(x)
            case _:
                graph = torch.sparse_coo_tensor(self.edges, self.weights, (len(x), len(x))).coalesce()
                made = self.linear(x) * graph.values().mean() + torch.sparse.sum(graph)
        return x + torch.tanh(made)


KINDS = ("a graph", "a softmax of a graph", "a mask that stays", "made dense again", "values taken out")


@pytest.mark.parametrize("kind", KINDS)
def test_exact_within_the_budget(kind: str, tmp_path: Path) -> None:
    assert_exact(lambda: nn.Sequential(*[Block(kind) for _ in range(4)]), tmp_path, HOMES[KINDS.index(kind) % 2])


class Edges(nn.Module):
    """Among all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = torch.tensor([[0, 7], [7, 0]])
        graph = torch.sparse_coo_tensor(edges, torch.ones(2), (len(x), len(x)))
        made: torch.Tensor = self.linear(x)
        return torch.sparse.mm(graph, made) if len(x) == 8 else made


def test_no_part_of_a_batch_is_tried_whose_edges_lead_past_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """To say how many parts would fit, parts are run. PyTorch would write where nothing is: the process would crash."""
    built, make = set[int](), torch.sparse_coo_tensor

    def sparse_coo_tensor(indices: Any, values: Any, size: Any) -> Any:
        made = make(indices, values, size)
        built.add(size[0])
        return made

    monkeypatch.setattr(torch, "sparse_coo_tensor", sparse_coo_tensor)
    model = ts.stream(nn.Sequential(*[Edges() for _ in range(4)]), device="cpu", budget=1, home="device")
    with pytest.raises(BudgetError) as refused:
        model(rows())
    ts.unstream(model)
    assert refused.value.split is None
    assert built == {8}
