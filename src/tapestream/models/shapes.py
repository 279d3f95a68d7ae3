"""Shapes of networks, which are known without PyTorch: published sizes, and what numbers fit together."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from tapestream.errors import InputError

# name -> layers, width, heads, context. Two rows of table 2.1 contradict themselves (heads times head size is not the
# width); here both keep the printed head size of 128: 16 heads for 1.3B (printed 24), width 5120 for 13B (5140).
GPT_SIZES = {
    "gpt2-124m": (12, 768, 12, 1024),
    "gpt2-355m": (24, 1024, 16, 1024),
    "gpt2-774m": (36, 1280, 20, 1024),
    "gpt2-1.5b": (48, 1600, 25, 1024),
    "gpt3-125m": (12, 768, 12, 2048),
    "gpt3-350m": (24, 1024, 16, 2048),
    "gpt3-760m": (24, 1536, 16, 2048),
    "gpt3-1.3b": (24, 2048, 16, 2048),
    "gpt3-2.7b": (32, 2560, 32, 2048),
    "gpt3-6.7b": (32, 4096, 32, 2048),
    "gpt3-13b": (40, 5120, 40, 2048),
    "gpt3-175b": (96, 12288, 96, 2048),
}
# name -> block, blocks per stage. ResNet-2500 is the depth that cutting at the right places was once shown with.
RESNET_SIZES: dict[str, tuple[Literal["basic", "bottleneck"], tuple[int, ...]]] = {
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
    "resnet2500": ("bottleneck", (6, 32, 788, 6)),
}
EXPANSION = {"basic": 1, "bottleneck": 4}
"""Channels of a block's output, as multiples of those inside."""
GROUP_NBYTES = 2**20
"""Bytes of a group's parameters, at least: below, a disk spends its time on seeks and Python its memory on lists."""


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """The shape of a ResNet.

    ``stages``: blocks per stage; ``width``: channels of the first, doubled from stage to stage (a bottleneck's output
    has four times as many). ``stem``: "cifar" (3x3) or "imagenet" (7x7 with stride 2, pooling). Every stage but the
    first halves the resolution until ``output_stride`` is reached, from where on they dilate instead, the first block
    of a stage as the stage before; the last blocks of the last stage dilate by ``multi_grid`` times its dilation.
    ``zero_residual``: the last norm of every block starts at 0, so that however deep the network is, its blocks start
    as the identity (Goyal et al. 2017). ``group_nbytes``: bytes of parameters per group of layers, at least; 0: every
    layer is a module of its own. Raises InputError where the numbers do not fit together.
    """

    block: Literal["basic", "bottleneck"]
    stages: tuple[int, ...]
    width: int = 64
    stem: Literal["cifar", "imagenet"] = "imagenet"
    classes: int = 1000
    channels: int = 3
    output_stride: int | None = None
    multi_grid: tuple[int, ...] = ()
    zero_residual: bool = True
    group_nbytes: int = GROUP_NBYTES

    def __post_init__(self) -> None:
        if self.block not in EXPANSION or self.stem not in ("cifar", "imagenet"):
            raise InputError(
                f"ResNetConfig: block is 'basic' or 'bottleneck' and stem 'cifar' or 'imagenet', not {self.block!r} "
                f"and {self.stem!r}"
            )
        if not self.stages or min(*self.stages, self.width, self.classes, self.channels) < 1 or self.group_nbytes < 0:
            raise InputError(
                f"ResNetConfig: every stage needs a block or more, and width, classes and channels are at least 1; "
                f"found stages={self.stages}, width={self.width}, classes={self.classes}, channels={self.channels}, "
                f"group_nbytes={self.group_nbytes}"
            )
        strides = [self.stem_stride * 2**n for n in range(len(self.stages))]
        if self.output_stride is not None and self.output_stride not in strides:
            raise InputError(
                f"ResNetConfig: output_stride {self.output_stride} was asked for; with this stem and "
                f"{len(self.stages)} stages it is one of {', '.join(map(str, strides))}"
            )
        if len(self.multi_grid) > self.stages[-1] or min(self.multi_grid, default=1) < 1:
            raise InputError(
                f"ResNetConfig: multi_grid {self.multi_grid} is for the last blocks of a stage of {self.stages[-1]}; "
                "give at most that many factors, all at least 1"
            )

    @classmethod
    def named(cls, name: str, **changes: Any) -> Self:
        """A published shape such as ``"resnet50"``, or ``"resnet2500"``; InputError lists all names."""
        found = RESNET_SIZES.get(name.lower().replace("-", ""))
        if found is None:
            raise InputError(
                f"no ResNet is named {name!r}; choose one of {', '.join(RESNET_SIZES)}, or ResNetConfig.cifar(depth), "
                "or give ResNetConfig the numbers"
            )
        return cls(*found, **changes)

    @classmethod
    def cifar(cls, depth: int, *, stages: int = 3, width: int = 16, **changes: Any) -> Self:
        """He et al.'s 6m+2 layers for small images: ``depth`` - 2 layers in basic blocks, spread over the stages as
        evenly as can be. InputError for a depth that is odd or has fewer blocks than stages."""
        blocks = (depth - 2) // 2
        if depth % 2 or blocks < stages:
            raise InputError(
                f"a ResNet for small images has 2 layers and 2 more per block, in {stages} stages of a block or more; "
                f"{depth} layers were asked for: the nearest possible is {max(2 + 2 * stages, depth + depth % 2)}"
            )
        each = tuple(blocks // stages + (n < blocks % stages) for n in range(stages))
        return cls("basic", each, **{"width": width, "stem": "cifar", "classes": 10, **changes})

    @classmethod
    def deep(cls, depth: int, *, width: int = 64, **changes: Any) -> Self:
        """ResNet-50 and ResNet-101 continued: bottlenecks in stages of 3, 4, all the rest, and 3. InputError for a
        depth that is not 2 more than a multiple of 3, or less than 35."""
        blocks, left = divmod(depth - 2, 3)
        if left or blocks < 11:
            raise InputError(
                f"a ResNet of bottlenecks has 2 layers and 3 more per block, 11 blocks or more; {depth} layers were "
                f"asked for: the nearest possible is {2 + 3 * max(11, round((depth - 2) / 3))}"
            )
        return cls("bottleneck", (3, 4, blocks - 10, 3), **{"width": width, **changes})

    @property
    def depth(self) -> int:
        """Layers with weights on the longest way through, projections not counted, as papers count."""
        return 2 + sum(self.stages) * (2 if self.block == "basic" else 3)

    @property
    def stem_stride(self) -> int:
        """Pixels of the image per pixel after the stem."""
        return 1 if self.stem == "cifar" else 4

    @property
    def features(self) -> tuple[int, ...]:
        """Channels after each stage."""
        return tuple(EXPANSION[self.block] * self.width * 2**n for n in range(len(self.stages)))


@dataclass(frozen=True, slots=True)
class DRANetConfig:
    """``backbone``: a ResNet at stride 8 (see `DRANetConfig.on`), ``classes``: of a pixel. ``auxiliary``: weight of the
    loss at the head on the last stage but one (0: no such head). ``ignore``: label of pixels that count for nothing.
    Raises InputError where the numbers do not fit together."""

    backbone: ResNetConfig
    classes: int
    auxiliary: float = 0.4
    ignore: int = 255

    def __post_init__(self) -> None:
        if self.classes < 2 or self.auxiliary < 0:
            raise InputError(
                f"DRANetConfig: classes is at least 2 and auxiliary at least 0, not {self.classes} and {self.auxiliary}"
            )
        if len(self.backbone.stages) < 2 or self.backbone.features[-1] < 64 or self.backbone.features[-1] % 64:
            raise InputError(
                f"DRANetConfig: the backbone needs two stages or more and a multiple of 64 channels at its end, for "
                f"the attentions divide them by 4 and by 16; it has {len(self.backbone.stages)} stages and "
                f"{self.backbone.features[-1]} channels"
            )

    @classmethod
    def on(cls, backbone: ResNetConfig, classes: int, **changes: Any) -> Self:
        """On this backbone as the paper has it: stride 8, and in the last stage the multi-grid (1, 2, 4)."""
        grid = (1, 2, 4)[-min(3, backbone.stages[-1]) :]
        return cls(replace(backbone, output_stride=8, multi_grid=grid), classes, **changes)
