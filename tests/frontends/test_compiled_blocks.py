"""Compiled blocks are compiled as in plain PyTorch: where that compiles nothing (modules of its own), nothing is.

The backend here changes what it compiles, so that bits tell what was compiled.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE
from torch import nn

import tapestream as ts

WIDTH = 32
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="Dynamo does not know the simulated GPU")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.inner(self.norm(x)))


class Calls(nn.Module):
    """PyTorch's own around the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), Own())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inside(x))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a class of the user's": Own,
    "a Sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "a Sequential of the user's": lambda: nn.Sequential(Own(), nn.Tanh()),
    "an encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True),
    "one that calls a Sequential": Calls,
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def scaling(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend that makes everything a little larger."""
    return lambda *args: [one * (1 + 2**-10) if one.is_floating_point() else one for one in graph(*args)]


def trained(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.randn(2, 8, WIDTH, device=DEVICE)).square().mean()
        loss.backward()
        gradients = [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
        found += [loss.detach().cpu(), *gradients]
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo asks everything of tensors
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", ["disk", "device"])
def test_what_is_compiled_is_what_plain_pytorch_compiles(kind: str, home: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, model, eager = (Net(kind).to(DEVICE) for _ in range(3))
    for one in (model, eager):
        one.load_state_dict(plain.state_dict())
    for one in (plain, model):
        for layer in one.layers:
            layer.compile(backend=scaling)
    expected = trained(plain)
    compiles = not all(map(torch.equal, expected, trained(eager)))
    assert compiles == (kind not in ("a Sequential", "an encoder layer"))
    ts.stream(model, device=DEVICE, budget="1MiB", home=home, folder=tmp_path if home == "disk" else None)
    found = trained(model)
    ts.unstream(model)
    torch._dynamo.reset()
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_whose_blocks_are_compiled_is_still_not_compiled_as_a_whole(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Net("a class of the user's")
    for layer in model.layers:
        layer.compile(backend="eager")
    ts.stream(model, device=DEVICE, budget="1MiB", folder=tmp_path)
    trained(model)
    with pytest.raises(ts.InputError, match="was asked"):
        torch.compile(model, backend="eager")(torch.randn(2, 8, WIDTH, device=DEVICE))
    trained(model)
    ts.unstream(model)
    torch._dynamo.reset()
