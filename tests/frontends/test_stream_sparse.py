"""Sparse tensors of trained values, or of anything else, in blocks: exact on both homes, at the least budget too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Trace, assert_same
from test_stream_shared import at_the_least, streamed, trained
from torch import nn
from torch.nn import functional as F

import tapestream as ts

WIDTH, COUNT = 8, 12


class Sparse(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.values = nn.Parameter(torch.randn(COUNT) / 4)
        places = torch.randperm(WIDTH * WIDTH)[:COUNT].sort().values
        self.register_buffer("places", torch.stack([places // WIDTH, places % WIDTH]))
        counts = torch.bincount(places // WIDTH, minlength=WIDTH)
        self.register_buffer("rows", torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, shape = x.flatten(0, -2), (WIDTH, WIDTH)
        match self.kind:
            case "added":
                delta = torch.sparse_coo_tensor(self.places, self.values, shape)
                made = F.linear(flat, self.inner.weight + delta, self.inner.bias)
            case "a product":
                made = torch.sparse.mm(torch.sparse_coo_tensor(self.places, self.values, shape), flat.T).T
            case "a product of one that was made":
                made = torch.sparse.mm(
                    torch.sparse_coo_tensor(self.places, self.values * 2, shape).coalesce(), flat.T
                ).T
            case "compressed":
                made = (torch.sparse_csr_tensor(self.rows, self.places[1], self.values, shape) @ flat.T).T
            case _:
                made = torch.sparse.mm(self.inner.weight.to_sparse(), flat.T).T * self.values[:WIDTH]
        return torch.tanh(made).view(x.shape) + x


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Sparse(kind) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize("kind", ["added", "a product", "a product of one that was made", "compressed", "dense"])
def test_exact(kind: str, disk: bool, tmp_path: Path) -> None:
    make: Callable[[], nn.Module] = lambda: Net(kind)  # noqa: E731
    torch.manual_seed(0)
    expected: Trace = trained(make())
    folder = tmp_path if disk else None
    assert_same(expected, streamed(make, 2**30, folder))
    assert_same(expected, at_the_least(make, folder))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.eye(WIDTH).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.table, torch.tanh(self.inner(x)).T).T + x


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
def test_sparse_buffers(disk: bool, tmp_path: Path) -> None:
    left = []
    for streaming in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(*[Held() for _ in range(4)]), torch.randn(4, WIDTH)
        if streaming:
            home: dict[str, Any] = {"home": "disk", "folder": tmp_path} if disk else {"home": "device"}
            ts.stream(model, device="cpu", budget="1MiB", **home)
        optimizer = (ts.optimizer if streaming else made)(model, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        left.append({name: value.to_dense().clone() for name, value in model.state_dict().items()})
    assert left[0].keys() == left[1].keys()
    assert all(torch.equal(value, left[1][name]) for name, value in left[0].items())


def made(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    return kind(model.parameters(), **options)
