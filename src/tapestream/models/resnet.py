"""ResNet of any depth: the CIFAR and ImageNet families of He et al., dilated ones for segmentation, a million layers.

He et al. 2016, "Deep Residual Learning for Image Recognition": blocks, stems, stages. Projections are 1x1 convolutions
wherever a shape changes (option B), and a bottleneck strides in its 3x3 convolution, as torchvision does; so names in
``state_dict()`` are torchvision's. Dilation and multi-grid: Chen et al. 2017, "Rethinking Atrous Convolution".
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.models._random import keyed_generator
from tapestream.models.grouped import Group, Key, Layer, Stack, grouped
from tapestream.models.shapes import EXPANSION, ResNetConfig


class BasicBlock(Layer):
    """Two 3x3 convolutions: (batch, inputs, height, width) -> (batch, planes, height/stride, width/stride)."""

    expansion = EXPANSION["basic"]

    def __init__(
        self, inputs: int, planes: int, stride: int = 1, dilation: int = 1, *, zero_residual: bool = True
    ) -> None:
        super().__init__()
        self.zero_residual = zero_residual
        self.conv1 = _conv3x3(inputs, planes, stride, dilation)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(planes, planes, 1, dilation)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _projection(inputs, planes, stride)

    def run(self, x: Tensor) -> Tensor:
        """Convolution, norm, ReLU, convolution, norm; plus the input; ReLU."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result

    def reset(self, generator: torch.Generator) -> None:
        """See `reset_convolutions`; the last norm as ``zero_residual`` has it."""
        reset_convolutions(self, generator)
        if self.zero_residual:
            nn.init.zeros_(self.bn2.weight)


class Bottleneck(Layer):
    """1x1, 3x3 and 1x1 convolution: (batch, inputs, height, width) -> (batch, 4 planes, height/stride, ...)."""

    expansion = EXPANSION["bottleneck"]

    def __init__(
        self, inputs: int, planes: int, stride: int = 1, dilation: int = 1, *, zero_residual: bool = True
    ) -> None:
        super().__init__()
        self.zero_residual = zero_residual
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv3x3(planes, planes, stride, dilation)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(inputs, outputs, stride)

    def run(self, x: Tensor) -> Tensor:
        """Convolution and norm three times with ReLUs in between; plus the input; ReLU."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result

    def reset(self, generator: torch.Generator) -> None:
        """See `reset_convolutions`; the last norm as ``zero_residual`` has it."""
        reset_convolutions(self, generator)
        if self.zero_residual:
            nn.init.zeros_(self.bn3.weight)


_BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class Backbone(nn.Module):
    """Stem and stages: images (batch, channels, height, width) -> features of the last stage.

    Under ``torch.device("meta")`` nothing is allocated; ``to_empty`` and ``initialize`` give the values, for the whole
    model or piece by piece in any order. ``blocks`` is what to stream.
    """

    def __init__(self, config: ResNetConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        if config.stem == "cifar":
            self.conv1 = nn.Conv2d(config.channels, config.width, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(config.channels, config.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if config.stem == "imagenet" else nn.Identity()
        inputs = config.width
        for number, outputs in enumerate(config.features):
            self.add_module(f"layer{number + 1}", Stack(_stage(config, number, inputs, (seed, f"layer{number + 1}"))))
            inputs = outputs

    @property
    def stacks(self) -> list[Stack]:
        """The stages."""
        return [m for m in self.children() if isinstance(m, Stack)]

    @property
    def blocks(self) -> list[nn.Module]:
        """What to stream: ``stream(model, blocks=model.blocks)``."""
        return [block for stack in self.stacks for block in stack]

    def initialize(self) -> None:
        """Initial values in place: He et al. 2015 for convolutions. What is on meta is left."""
        for block in self.blocks:
            assert isinstance(block, (Layer, Group))
            block.initialize()
        if not self.conv1.weight.is_meta:
            generator = keyed_generator(self.seed, "stem")
            for module in (self.conv1, self.bn1):
                reset_convolutions(module, generator)

    def start(self, images: Tensor) -> Tensor:
        """The stem."""
        result: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return result

    def forward(self, images: Tensor) -> Any:
        """(batch, channels, height, width) -> (batch, features[-1], height/stride, width/stride)."""
        x = self.start(images)
        for stack in self.stacks:
            x = stack(x)
        return x


class ResNet(Backbone):
    """A classifier of images."""

    def __init__(self, config: ResNetConfig, *, seed: int = 0) -> None:
        device = torch.get_default_device()
        with torch.device("meta"):
            super().__init__(config, seed=seed)
            self.fc = nn.Linear(config.features[-1], config.classes)
        fill(self, device)

    def initialize(self) -> None:
        """As `Backbone.initialize`; the classifier starts normal with 0.01 (Goyal et al. 2017)."""
        super().initialize()
        if not self.fc.weight.is_meta:
            nn.init.normal_(self.fc.weight, 0.0, 0.01, generator=keyed_generator(self.seed, "fc"))
            nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, classes); with integer ``targets`` (batch,) their mean cross-entropy in nats."""
        logits: Tensor = self.fc(super().forward(images).mean((2, 3)))
        return logits if targets is None else F.cross_entropy(wide(logits), targets)


def wide(logits: Tensor) -> Tensor:
    """In float32 or better: a bfloat16 loss has three digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Hollow(Protocol):
    """A model that can be made without values."""

    def to_empty(self, *, device: torch.device) -> Any: ...
    def initialize(self) -> None: ...


def fill(model: Hollow, device: torch.device) -> None:
    """Give a model that was built on meta its bytes and initial values, unless meta is where it is to be."""
    if device.type != "meta":
        model.to_empty(device=device)
        model.initialize()


@torch.no_grad()
def reset_convolutions(root: nn.Module, generator: torch.Generator) -> None:
    """Convolutions: normal, variance 2 / fan-out (He et al. 2015), biases 0; BatchNorms as PyTorch has them."""
    for module in root.modules():
        if isinstance(module, nn.Conv2d):
            fan = module.out_channels * math.prod(module.kernel_size) // module.groups
            module.weight.normal_(0.0, math.sqrt(2 / fan), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()


def _stage(config: ResNetConfig, number: int, inputs: int, key: Key) -> Iterator[Layer | Group]:
    """The blocks of one stage: the first alone if it changes the shape, equal ones that follow each other in groups."""
    make, planes, count = _BLOCKS[config.block], config.width * 2**number, config.stages[number]
    outputs = planes * make.expansion
    wanted = config.stem_stride * 2**number
    factor = max(1, wanted // (config.output_stride or wanted))
    stride = 2 if number and factor == 1 else 1
    grid = config.multi_grid if number == len(config.stages) - 1 else ()
    dilations = [factor] * (count - len(grid)) + [factor * g for g in grid]
    if number and factor > 1 and count > len(grid):
        dilations[0] = dilations[0] // 2  # of what it reads, the resolution before the stride that is not taken
    shapes = [(inputs if k == 0 else outputs, stride if k == 0 else 1, dilations[k]) for k in range(count)]
    first = 0
    while first < count:
        stop = next((k for k in range(first, count) if shapes[k] != shapes[first]), count)
        entering, step, dilation = shapes[first]
        if config.group_nbytes and stop - first > 1:
            with torch.device("meta"):
                template = make(entering, planes, step, dilation, zero_residual=config.zero_residual)
            yield from grouped(template, stop - first, first, key, config.group_nbytes)
        else:
            for k in range(first, stop):
                layer = make(entering, planes, step, dilation, zero_residual=config.zero_residual)
                layer.key = (*key, k)
                yield layer
        first = stop


def _conv3x3(inputs: int, outputs: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
