"""The layered networks of benchmarks/supernets.py, its deeper profiles, one technique, and its picture."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapestream.costs import Link, Machine
from tapestream.ir import Tier

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.supernets")


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.layered")


def test_layers_are_those_of_the_papers(layered: Any) -> None:
    with torch.device("meta"):
        made = {
            "AlexNet": layered.alexnet(96, 4096), "VGG-16": layered.vgg16(64, 4096, 7),
            "ResNet-50": layered.resnet(64, (3, 4, 6, 3)), "DenseNet-121": layered.densenet(32, (6, 12, 24, 16)),
        }  # fmt: skip
    kinds = (nn.Conv2d, nn.Linear)
    counts = {
        name: sum(isinstance(layer, layered.Layer) and isinstance(layer.module, kinds) for layer in layers)
        for name, layers in made.items()
    }
    assert counts == {"AlexNet": 8, "VGG-16": 16, "ResNet-50": 50 + 4, "DenseNet-121": 121}  # 4: shortcuts


def test_blocks_are_joined_as_written(layered: Any) -> None:
    x = torch.randn(2, 8, 6, 6)
    torch.manual_seed(0)
    layers = layered.bottleneck(8, 2, 1)
    state = (x,)
    for layer in layers:
        state = layer(state)
    inner = [layer.module for layer in layers if isinstance(layer, layered.Layer)]
    y = x
    for module in inner[:-1]:
        y = module(y)
    assert len(state) == 1
    assert torch.equal(state[0], torch.relu(y + x))
    layers = layered._branches(8, 2, ((1,), (1, 3)))
    state = (x,)
    for layer in layers:
        state = layer(state)
    assert [tuple(t.shape) for t in state] == [(2, 6, 6, 6)]


def test_a_deeper_profile_is_that_of_the_deeper_network(table: Any) -> None:
    images = table._images(8)
    few, more = (table._resnet(2, blocks).profile(images) for blocks in (4, 6))
    each = (len(more) - len(few)) // 2
    start = len(table.resnet(2, (3, 4, 4, 0))) - 3 - each
    deep = table.deeper(few, start, each, 2)

    def figures(profile: Any) -> list[Any]:
        return [(c.output_nbytes, c.saved_nbytes, c.reads_input, c.reads_output) for c in profile.stages]

    assert figures(deep) == figures(more)
    assert sorted(deep.carried, key=str) == sorted(more.carried, key=str)


@pytest.mark.parametrize("place", [0, 1, 4, 5])
def test_each_technique_has_the_bits_of_plain_pytorch(table: Any, place: int, tmp_path: Path) -> None:
    case, technique = table.Layered("D", lambda: table.densenet(2, (1, 1)), (2, 3, 8, 8)), table.TECHNIQUES[place]
    machine = Machine({lane: Link(1e9) for lane in ((Tier.DISK, Tier.DEVICE), (Tier.DEVICE, Tier.DISK))})
    network, images = table.Network(case.layers()), case.images()
    wanted = table._gradients(network, images, network.plain)
    _, least = table.leanest(network.profile(images), technique, machine, network)
    chain, found = network.under(least, technique, machine, str(tmp_path), images)
    assert table.same_bits(found, wanted)
    assert chain.plan is not None
    assert chain.plan.peak_nbytes <= least


def test_the_picture(table: Any, tmp_path: Path) -> None:
    rows = [
        {"network": name, "technique": technique, "planned peak MiB": peak, "largest working set MiB": 1.0}
        for name in ("A", "B")
        for technique, peak in (("none (computed)", 9.0), ("liveness", 4.0), ("offload", 1.5))
    ]
    table.draw([*rows, {"network": "deep", "technique": "offload", "ratio": 4.0}], tmp_path / "peaks.png")
    assert (tmp_path / "peaks.png").read_bytes().startswith(b"\x89PNG")
