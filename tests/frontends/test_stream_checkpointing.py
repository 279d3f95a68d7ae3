"""Models that checkpoint their activations by themselves: inside and around streamed blocks that is for the plan."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, copy_of, seed
from streaming import gradients_of, options_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.stream import handle_of
from tapestream.runner.checkpointing import checkpointing_off

WIDTH = 32


class Block(nn.Module):
    """``inside``: it checkpoints a part of itself."""

    def __init__(self, inside: dict[str, Any] | None) -> None:
        super().__init__()
        self.inside = inside
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.part(x) if self.inside is None else checkpoint(self.part, x, **self.inside)
        return x + made


class Net(nn.Module):
    """``around``: it checkpoints its blocks."""

    def __init__(self, kind: dict[str, Any], place: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind if place == "inside" else None) for _ in range(4))
        self.around = kind if place == "around" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, **self.around)
        return x.square().mean()


class Counted(TorchDispatchMode):
    """Counts forwards of blocks: each has one tanh."""

    only_watches = True
    forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def differentiated(model: nn.Module) -> dict[str, Any]:
    seed(3)
    loss = model(torch.linspace(-1, 1, 128 * WIDTH).reshape(128, WIDTH))
    loss.backward()
    found = gradients_of(model) | {"loss": copy_of(loss), "random": torch.get_rng_state()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize(
    "kind", [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "preserve_rng_state": True}]
)
def test_what_a_model_checkpoints(kind: dict[str, Any], place: str, home: str, tight: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net(kind, place)
    model = ts.stream(copy.deepcopy(plain), budget=1 if tight else "1 GiB", **options_of("auto", tmp_path, home))
    if tight:
        with pytest.raises(BudgetError) as least:
            differentiated(model)
        assert least.value.least_nbytes is not None
        handle_of(model).budget = ts.Budget(least.value.least_nbytes)
    for _ in range(2):
        assert_same(differentiated(plain), differentiated(model))
    with Counted() as counted:
        differentiated(model)
    assert counted.forwards == ts.report(model).plan.simulation.forwards
    ts.unstream(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_is_off_in_one_thread_and_on_again_afterwards(reentrant: bool) -> None:
    runs: list[str] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(threading.current_thread().name)
        return x.sin()

    def differentiate() -> None:
        x = torch.ones(3, requires_grad=True)
        checkpoint(counted, x, use_reentrant=reentrant).sum().backward()

    with checkpointing_off():
        with checkpointing_off():
            differentiate()
        differentiate()
        other = threading.Thread(target=differentiate, name="other")
        other.start()
        other.join()
    here = threading.current_thread().name
    assert runs == [here, here, "other", "other"]
    differentiate()
    assert runs[4:] == [here, here]
