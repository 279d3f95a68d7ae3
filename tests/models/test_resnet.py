"""ResNets: published counts, shapes, dilation, and training them streamed, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.models import ResNet, ResNetConfig

# Parameters as torchvision's documentation has them.
PUBLISHED = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}  # fmt: skip
# Nothing is kept whole on the way: groups of two or three layers, three of them different in shape.
SMALL = ResNetConfig.cifar(32, width=8, classes=4, zero_residual=False, group_nbytes=5_000)


def on_meta(config: ResNetConfig) -> ResNet:
    with torch.device("meta"):
        return ResNet(config)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_counts_and_names_are_the_published_ones(name: str, count: int) -> None:
    model = on_meta(ResNetConfig.named(name, group_nbytes=0))
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.config.depth == int(name.removeprefix("resnet"))
    last = 3 if "bottleneck" in model.config.block else 2
    names = list(model.state_dict())
    assert names[0] == "conv1.weight"
    assert names[-1] == "fc.bias"
    assert f"layer4.0.bn{last}.running_var" in names
    assert "layer2.0.downsample.1.num_batches_tracked" in names


def test_deep_ones() -> None:
    assert ResNetConfig.named("ResNet-2500").stages == (6, 32, 788, 6)
    assert ResNetConfig.named("resnet2500").depth == 2498
    assert ResNetConfig.cifar(110).stages == (18, 18, 18)
    assert ResNetConfig.cifar(1202).depth == 1202
    million = ResNetConfig.cifar(250_002)
    assert million.depth == 250_002
    assert sum(million.stages) == 125_000
    assert ResNetConfig.deep(50).stages == ResNetConfig.named("resnet50").stages
    assert ResNetConfig.deep(101).stages == ResNetConfig.named("resnet101").stages


def dilations(model: ResNet) -> list[list[int]]:
    """Of the 3x3 convolutions, stage by stage."""
    return [[m.dilation[0] for m in stack.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
            for stack in model.stacks]  # fmt: skip


@pytest.mark.parametrize(("stride", "last"), [(8, [4, 8, 16]), (16, [2, 4, 8])])
def test_a_grid_for_all_blocks_of_a_stage_multiplies_its_dilation(stride: int, last: list[int]) -> None:
    """Chen et al. 2017, section 3.3: unit rates times multi-grid. Without one, as torchvision's dilated stages."""
    config = ResNetConfig.named("resnet50", output_stride=stride, multi_grid=(1, 2, 4), group_nbytes=0)
    assert dilations(on_meta(config))[3] == last
    assert dilations(on_meta(replace(config, multi_grid=())))[3] == [last[0] // 2, last[0], last[0]]


def test_stride_turns_into_dilation() -> None:
    config = ResNetConfig("bottleneck", (2, 2, 3, 5), width=4, output_stride=8, multi_grid=(1, 2, 4))
    model = ResNet(config)
    x = model.start(torch.randn(2, 3, 64, 64))
    sizes = []
    for stack in model.stacks:
        x = stack(x)
        sizes.append(x.shape[-1])
    assert sizes == [16, 8, 8, 8]
    plain = on_meta(replace(config, group_nbytes=0))
    # The first block after a stride that is not taken still sees the resolution of the stage before.
    assert dilations(plain) == [[1, 1], [1, 1], [1, 2, 2], [2, 4, 4, 8, 16]]
    strides = [m.stride for m in plain.stacks[3].modules() if isinstance(m, nn.Conv2d)]
    assert set(strides) == {(1, 1)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ResNetConfig.named("resnet77"), "resnet2500"),
        (lambda: ResNetConfig.cifar(101), "102"),
        (lambda: ResNetConfig.cifar(4), "8"),
        (lambda: ResNetConfig.deep(100), "101"),
        (lambda: ResNetConfig("basic", ()), "stages"),
        (lambda: ResNetConfig("wide", (1,)), "bottleneck"),  # type: ignore[arg-type]
        (lambda: ResNetConfig("basic", (1, 1), output_stride=5), "4, 8"),
        (lambda: ResNetConfig("basic", (3, 1), multi_grid=(1, 2)), "last blocks"),
    ],
)
def test_shapes_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_a_deep_one_starts_as_its_stem_and_projections() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 8).relu()
    for config in (ResNetConfig.cifar(42, stages=1, width=8), replace(SMALL, stages=(10,), zero_residual=True)):
        stack = ResNet(config).stacks[0]
        assert torch.equal(stack(x), x)
    assert not torch.equal(ResNet(replace(SMALL, stages=(10,))).stacks[0](x), x)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        images, targets = torch.randn(2, 3, 16, 16, generator=generator), torch.randint(4, (2,), generator=generator)
        loss = model(images, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "foreach": False}


@pytest.mark.parametrize(("update", "engine"), [("backward", "auto"), ("step", "auto"), ("backward", "adversarial")])
def test_streamed_from_disk_it_trains_like_modules_in_plain_pytorch(update: str, engine: str, tmp_path: Path) -> None:
    """Statistics included: however often a group is recomputed they move once."""
    torch.set_num_threads(1)
    plain = ResNet(replace(SMALL, group_nbytes=0), seed=7)
    expected = train(plain, torch.optim.SGD(plain.parameters(), **OPTIONS))
    with torch.device("meta"):
        model: Any = ResNet(SMALL, seed=7)
    ts.stream(model, device="cpu", budget="540 KiB", folder=tmp_path, blocks=model.blocks, engine=engine)
    optimizer = ts.optimizer(model, torch.optim.SGD, update=update, **OPTIONS)
    assert train(model, optimizer) == expected
    plan = ts.report(model).plan
    assert plan.simulation.forwards > len(plan.profile)
    assert sum(plan.simulation.bytes_moved.values()) > 0
    found, wanted = model.state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    model.eval()
    plain.eval()
    with torch.no_grad():
        images = torch.randn(2, 3, 16, 16)
        assert torch.equal(model(images), plain(images))
    ts.unstream(model)
