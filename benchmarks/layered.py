"""Convolutional networks layer by layer, as SuperNeurons takes them: every stage of the chain is one basic layer.

A state is a tuple: the tensor at hand first, then shortcuts, branches and features that wait to be joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]
_HEAVY = (nn.Conv2d, nn.Linear)


class Layer(nn.Module):
    """``module`` on the tensor at ``place``. ``heavy``: convolutions and products, as in the paper."""

    def __init__(self, module: nn.Module, place: int = 0) -> None:
        super().__init__()
        self.module, self.place = module, place

    @property
    def heavy(self) -> bool:
        """Whether its output is worth keeping."""
        return isinstance(self.module, _HEAVY)

    def forward(self, state: State) -> State:
        """The state with that tensor replaced."""
        place = self.place
        return (*state[:place], self.module(state[place]), *state[place + 1 :])


class Fork(nn.Module):
    """The tensor at ``place`` once more, at the end."""

    heavy = False

    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self.place = place

    def forward(self, state: State) -> State:
        """One tensor more, none of them new."""
        return (*state, state[self.place])


class Join(nn.Module):
    """The first tensor and the last ``others`` as one: their sum, or all channels side by side."""

    heavy = True

    def __init__(self, others: int, *, add: bool) -> None:
        super().__init__()
        self.others, self.add = others, add

    def forward(self, state: State) -> State:
        """``others`` tensors less."""
        first, rest, joined = state[0], state[1 : -self.others], state[-self.others :]
        return (first + joined[0] if self.add else torch.cat((first, *joined), 1), *rest)


Layers = list[nn.Module]


@dataclass(frozen=True, slots=True)
class Layered:
    """A network by name; ``make`` gives its layers, and ``shape`` is that of a batch of images."""

    name: str
    make: Callable[[], Layers]
    shape: tuple[int, int, int, int]

    def layers(self) -> Layers:
        """New ones, with the same bits every time."""
        torch.manual_seed(0)
        return self.make()

    def images(self) -> Tensor:
        """A batch."""
        torch.manual_seed(1)
        return torch.randn(self.shape)


def heavy_of(layers: Sequence[nn.Module]) -> list[int]:
    """The layers whose outputs are worth keeping: convolutions, products, joins."""
    return [k for k, layer in enumerate(layers) if layer.heavy]


def _conv(before: int, after: int, size: int, stride: int = 1, pad: int | None = None, place: int = 0) -> Layers:
    padding = size // 2 if pad is None else pad
    return [Layer(nn.Conv2d(before, after, size, stride, padding), place), Layer(nn.ReLU(), place)]


def _normed(before: int, after: int, size: int, stride: int = 1, place: int = 0, relu: bool = True) -> Layers:
    conv = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    found: Layers = [Layer(conv, place), Layer(nn.BatchNorm2d(after), place)]
    return [*found, Layer(nn.ReLU(), place)] if relu else found


def _pool(kind: Callable[..., nn.Module], size: int, stride: int, pad: int = 0, place: int = 0) -> nn.Module:
    return Layer(kind(size, stride, pad), place)


def _head(channels: int) -> Layers:
    return [Layer(nn.AdaptiveAvgPool2d(1)), Layer(nn.Flatten()), Layer(nn.Linear(channels, 10))]


def alexnet(width: int, hidden: int) -> Layers:
    """Krizhevsky et al. 2012 with its response normalisation; ``width`` 96 and ``hidden`` 4096 are theirs."""
    w = width
    norm = [Layer(nn.LocalResponseNorm(5)), _pool(nn.MaxPool2d, 3, 2)]
    layers = [*_conv(3, w, 11, 4, 2), *norm, *_conv(w, w * 8 // 3, 5, 1, 2)]
    layers += [Layer(nn.LocalResponseNorm(5)), _pool(nn.MaxPool2d, 3, 2), *_conv(w * 8 // 3, 4 * w, 3)]
    layers += [*_conv(4 * w, 4 * w, 3), *_conv(4 * w, w * 8 // 3, 3), _pool(nn.MaxPool2d, 3, 2)]
    layers += [Layer(nn.AdaptiveAvgPool2d(2)), Layer(nn.Flatten())]
    for before in (4 * (w * 8 // 3), hidden):
        layers += [Layer(nn.Linear(before, hidden)), Layer(nn.ReLU()), Layer(nn.Dropout())]
    return [*layers, Layer(nn.Linear(hidden, 10))]


def vgg16(width: int, hidden: int, side: int) -> Layers:
    """Simonyan and Zisserman 2015, configuration D, for images of 32 times ``side`` pixels; ``width`` 64, ``hidden``
    4096 and ``side`` 7 are theirs."""
    layers: Layers = []
    before = 3
    for times, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(times):
            layers += _conv(before, factor * width, 3)
            before = factor * width
        layers.append(_pool(nn.MaxPool2d, 2, 2))
    layers.append(Layer(nn.Flatten()))
    for inputs in (before * side * side, hidden):
        layers += [Layer(nn.Linear(inputs, hidden)), Layer(nn.ReLU()), Layer(nn.Dropout())]
    return [*layers, Layer(nn.Linear(hidden, 10))]


def bottleneck(before: int, inner: int, stride: int) -> Layers:
    """He et al. 2016: 1x1, 3x3, 1x1 and the shortcut, a 1x1 convolution where the shape changes."""
    layers: Layers = [Fork(), *_normed(before, inner, 1), *_normed(inner, inner, 3, stride)]
    layers += _normed(inner, 4 * inner, 1, relu=False)
    if stride != 1 or before != 4 * inner:
        layers += _normed(before, 4 * inner, 1, stride, place=1, relu=False)
    return [*layers, Join(1, add=True), Layer(nn.ReLU())]


def resnet(width: int, blocks: Sequence[int]) -> Layers:
    """Bottleneck blocks in four sizes; ``width`` 64 and (3, 4, 6, 3) make ResNet-50."""
    layers: Layers = [*_normed(3, width, 3)]
    before = width
    for place, times in enumerate(blocks):
        for k in range(times):
            inner = width << place
            layers += bottleneck(before, inner, 2 if place and not k else 1)
            before = 4 * inner
    return [*layers, *_head(before)]


def inception(width: int, blocks: Sequence[int]) -> Layers:
    """Blocks A, B and C of Szegedy et al. 2017 (Inception-v4), smaller, with pooling in between."""
    w = width
    layers: Layers = [*_normed(3, w, 3), *_normed(w, 2 * w, 3, 2), *_normed(2 * w, 8 * w, 3)]
    before = 8 * w
    sizes = (((1,), (1, 3), (1, 3, 3)), ((1,), (1, 5), (1, 3, 5)), ((1,), (1, 3), (1, 5, 3)))
    for times, branches in zip(blocks, sizes, strict=True):
        for _ in range(times):
            layers += _branches(before, 2 * w, branches)
            before = 8 * w
        layers.append(_pool(nn.MaxPool2d, 3, 2, 1))
    return [*layers, *_head(before)]


def _branches(before: int, width: int, branches: Sequence[Sequence[int]]) -> Layers:
    """Convolutions of these sizes beside each other, and pooling with a 1x1 convolution."""
    layers: Layers = [Fork() for _ in branches]
    for place, sizes in enumerate(branches, 1):
        channels = before
        for size in sizes:
            layers += _normed(channels, width, size, place=place)
            channels = width
    layers += [_pool(nn.AvgPool2d, 3, 1, 1), *_normed(before, width, 1)]
    return [*layers, Join(len(branches), add=False)]


def densenet(growth: int, blocks: Sequence[int]) -> Layers:
    """Huang et al. 2017, with bottleneck layers; ``growth`` 32 and (6, 12, 24, 16) make DenseNet-121."""
    channels = 2 * growth
    layers: Layers = [*_normed(3, channels, 3)]
    for place, times in enumerate(blocks):
        if place:
            layers += [Layer(nn.BatchNorm2d(channels)), Layer(nn.ReLU()), Layer(nn.Conv2d(channels, channels // 2, 1))]
            layers.append(_pool(nn.AvgPool2d, 2, 2))
            channels //= 2
        for _ in range(times):
            layers += [Fork(), Layer(nn.BatchNorm2d(channels)), Layer(nn.ReLU())]
            layers += [*_normed(channels, 4 * growth, 1), Layer(nn.Conv2d(4 * growth, growth, 3, 1, 1))]
            layers.append(Join(1, add=False))
            channels += growth
    return [*layers, *_head(channels)]
