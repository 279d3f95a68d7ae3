"""Adapters: several in one model, trained in turns, merged, switched off, and of other kinds than LoRA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, HOMES, WIDTH, assert_exact, rows
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.on_cpu("bytes of the CPU are measured"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning"),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["up"], use_dora=True),
    "rank of each": lambda: peft.LoraConfig(
        r=2, target_modules=["up", "down"], use_rslora=True, rank_pattern={"layers.2.up": 4}
    ),
    "dropout": lambda: peft.LoraConfig(r=2, target_modules=["up", "down"], lora_dropout=0.3),
    "biases": lambda: peft.LoraConfig(r=2, target_modules=["up"], bias="lora_only"),
    "saved modules": lambda: peft.LoraConfig(r=2, target_modules=["up"], modules_to_save=["head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["up"]),
    "some layers": lambda: peft.LoraConfig(
        r=2, target_modules=["up"], layers_to_transform=[1, 3], layers_pattern="layers"
    ),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_kinds(kind: str, tmp_path: Path) -> None:
    home = HOMES[list(CONFIGS).index(kind) % 2]
    assert_exact(lambda: peft.get_peft_model(Net(), CONFIGS[kind]()), tmp_path, home)


def test_adapters_whose_layers_share_tensors_are_refused() -> None:
    """The advice works: an adapter with tensors of each layer."""
    model = peft.get_peft_model(Net(), peft.VeraConfig(r=2, target_modules=["up"]))
    with pytest.raises(InputError, match=r"share a BufferDict.*LoRA has some for each layer"):
        ts.stream(model, device="cpu", budget=AMPLE, home="device")


def two() -> Any:
    model = peft.get_peft_model(Net(), CONFIGS["lora"](), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(r=3, target_modules=["up"], init_lora_weights=False))
    for parameter in model.parameters():  # of both, so that an optimizer made now has both
        parameter.requires_grad_(True)
    return model


def in_turns(model: Any, optimizer: Any, step: int) -> None:
    model.set_adapter(("one", "two")[step % 2])


def both_at_once(model: Any, optimizer: Any, step: int) -> None:
    model.base_model.set_adapter(["one", "two"])


def merged_between(model: Any, optimizer: Any, step: int) -> None:
    model.set_adapter("one")
    if step == 1:
        with torch.no_grad():
            model.base_model.merge_adapter()
            model(rows(9))
            model.base_model.unmerge_adapter()


def scaled(model: Any, optimizer: Any, step: int) -> None:
    model.set_adapter("one")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling["one"] = 1.0 + step


@pytest.mark.thinned(2)
@pytest.mark.parametrize("change", [in_turns, both_at_once, merged_between, scaled])
def test_several(change: Callable[[Any, Any, int], None], tmp_path: Path) -> None:
    assert_exact(two, tmp_path, before=change, steps=3)


def test_without_the_adapter_and_with_it(tmp_path: Path) -> None:
    """A reference model that is the same model, its adapter switched off, as in preference training."""

    def loss(model: Any, number: int) -> Any:
        with torch.no_grad(), model.disable_adapter():
            reference = model(rows(number))
        return (model(rows(number)) - reference).square().mean() + model(rows(number + 5)).square().mean()

    assert_exact(lambda: peft.get_peft_model(Net(), CONFIGS["lora"]()), tmp_path, loss=loss)
