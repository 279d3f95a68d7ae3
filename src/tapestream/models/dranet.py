"""DRANet: semantic segmentation by two attentions that relate every pixel to a few centres, and a gated decoder.

Fu et al. 2020, "Scene Segmentation With Dual Relation-Aware Attention Network" (IEEE TNNLS). The backbone is a dilated
ResNet at stride 8 with multi-grid, of any depth. The decoder reads the output of its first stage: the blocks after it
carry that tensor along, so that it is held once, however deep the network is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.errors import InputError
from tapestream.models._random import keyed_generator
from tapestream.models.resnet import Backbone, fill, reset_convolutions, wide
from tapestream.models.shapes import DRANetConfig

CENTRES = (1, 2, 3, 6)
"""Sides of the grids that the position attention pools to: 50 centres."""
_DETAIL = 32  # channels of the first stage's output in the decoder


class PositionAttention(nn.Module):
    """Compact position attention (CPAM): every pixel attends to pooled centres. (batch, c, h, w) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.centres = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), *_conv(channels, channels, 1)) for side in CENTRES
        )
        self.query = nn.Conv2d(channels, channels // 4, 1)
        self.key = nn.Linear(channels, channels // 4)
        self.value = nn.Linear(channels, channels)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """x plus ``scale`` times what it attends to."""
        centres = torch.cat([centre(x).flatten(2) for centre in self.centres], 2).transpose(1, 2)  # batch, 50, c
        query = self.query(x).flatten(2).transpose(1, 2)  # batch, pixels, c/4
        attention = (query @ self.key(centres).transpose(1, 2)).softmax(-1)  # batch, pixels, 50
        found = self.value(centres).transpose(1, 2) @ attention.transpose(1, 2)  # batch, c, pixels
        result: Tensor = self.scale * found.view_as(x) + x
        return result


class ChannelAttention(nn.Module):
    """Compact channel attention (CCAM): every channel attends to c/16 channel centres. (batch, c, h, w) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.centres = _conv(channels, channels // 16, 1)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """x plus ``scale`` times what it attends to: the less alike two channels are, the more."""
        centres = self.centres(x).flatten(2)  # batch, c/16, pixels
        energy = x.flatten(2) @ centres.transpose(1, 2)  # batch, c, c/16
        attention = (energy.amax(-1, keepdim=True) - energy).softmax(-1)
        result: Tensor = self.scale * (attention @ centres).view_as(x) + x
        return result


class GatedDecoder(nn.Module):
    """Cross-level gating decoder: detail of an early stage where a gate, seen from both levels, lets it through."""

    def __init__(self, detail: int, channels: int) -> None:
        super().__init__()
        self.reduce = _conv(detail, _DETAIL, 3)
        self.gate = nn.Sequential(nn.Conv2d(channels + _DETAIL, 1, 1), nn.Sigmoid())
        self.fuse = _conv(channels + _DETAIL, channels, 3)
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, detail: Tensor, x: Tensor) -> Tensor:
        """(batch, d, H, W) and (batch, c, h, w) -> (batch, c, H, W)."""
        low = self.reduce(detail)
        high = F.interpolate(x, low.shape[-2:], mode="bilinear", align_corners=True)
        gated = self.gamma * self.gate(torch.cat([low, high], 1)) * low
        result: Tensor = self.fuse(torch.cat([gated, high], 1))
        return result


class Head(nn.Module):
    """Both attentions between 3x3 convolutions, and the decoder: features and detail -> logits at detail's size."""

    def __init__(self, detail: int, features: int, classes: int) -> None:
        super().__init__()
        inner, outer = features // 4, features // 8
        self.position = nn.Sequential(_conv(features, inner, 3), PositionAttention(inner), _conv(inner, inner, 3))
        self.channel = nn.Sequential(_conv(features, inner, 3), ChannelAttention(inner), _conv(inner, inner, 3))
        self.join = _conv(2 * inner, outer, 3)
        self.decoder = GatedDecoder(detail, outer)
        self.classify = nn.Sequential(nn.Dropout(0.1), nn.Conv2d(outer, classes, 1))

    def forward(self, x: Tensor, detail: Tensor) -> Tensor:
        """(batch, classes, height, width of ``detail``)."""
        joined = self.join(torch.cat([self.position(x), self.channel(x)], 1))
        result: Tensor = self.classify(self.decoder(detail, joined))
        return result


class DRANet(nn.Module):
    """Backbone, head, auxiliary head. ``blocks`` is what to stream; the meta device as `Backbone`."""

    def __init__(self, config: DRANetConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        channels = config.backbone.features
        device = torch.get_default_device()
        with torch.device("meta"):
            self.backbone = Backbone(config.backbone, seed=seed)
            self.head = Head(channels[0], channels[-1], config.classes)
            inner = channels[-2] // 4
            self.auxiliary = (
                nn.Sequential(_conv(channels[-2], inner, 3), nn.Dropout(0.1), nn.Conv2d(inner, config.classes, 1))
                if config.auxiliary
                else None
            )
        fill(self, device)

    @property
    def blocks(self) -> list[nn.Module]:
        """What to stream: ``stream(model, blocks=model.blocks)``."""
        return self.backbone.blocks

    @torch.no_grad()
    def initialize(self) -> None:
        """Initial values in place, as `Backbone`; what is on meta is left."""
        self.backbone.initialize()
        for name, head in (("head", self.head), ("auxiliary", self.auxiliary)):
            if head is None or next(head.parameters()).is_meta:
                continue
            generator = keyed_generator(self.seed, name)
            reset_convolutions(head, generator)
            for module in head.modules():
                match module:
                    case nn.Linear():
                        module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
                        module.bias.zero_()
                    case PositionAttention() | ChannelAttention():
                        module.scale.zero_()
                    case GatedDecoder():
                        module.gamma.fill_(1.0)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Logits (batch, classes, height, width) of ``images`` (batch, channels, height, width).

        With integer ``targets`` (batch, height, width): the loss, mean cross-entropy over the pixels that count, in
        nats, plus that of the auxiliary head by its weight. Raises InputError for targets of another size, and for a
        training batch of one image: the norm of a single centre has nothing to take a mean of.
        """
        if self.training and len(images) == 1:
            raise InputError(
                "DRANet pools each image to one centre and normalises it over the batch, which takes two images or "
                "more in training; one was given"
            )
        wanted = (len(images), *images.shape[-2:])
        if targets is not None and targets.shape != wanted:
            raise InputError(
                f"DRANet takes a target for each pixel, {wanted} for images of {tuple(images.shape)}; those "
                f"given are {tuple(targets.shape)}: crop or scale both alike"
            )
        *before, last = self.backbone.stacks
        x = detail = before[0](self.backbone.start(images))
        for stack in before[1:]:
            x, detail = stack(x, detail)
        # Here, not at the end: the gradients of x are then added in one order, with and without streaming.
        other = None if self.auxiliary is None or targets is None else self._loss(self.auxiliary(x), targets)
        x, detail = last(x, detail)
        logits = self.head(x, detail)
        if targets is None:
            return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=True)
        loss = self._loss(logits, targets)
        return loss if other is None else loss + self.config.auxiliary * other

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        full = F.interpolate(wide(logits), targets.shape[-2:], mode="bilinear", align_corners=True)
        return F.cross_entropy(full, targets, ignore_index=self.config.ignore)


def _conv(inputs: int, outputs: int, size: int) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
