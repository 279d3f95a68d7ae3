"""What ``train`` is to train, as its options say: what they mean, and whether they fit together. Without PyTorch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tapestream.cli import checks
from tapestream.cli.targets import GPTShape, gpt_shape
from tapestream.errors import InputError
from tapestream.models.shapes import RESNET_SIZES, DRANetConfig, ResNetConfig

BYTES = 256
"""The vocabulary of text taken as bytes."""
CLASSES = {"digits": 10, "shapes": 4}
"""Labels of images that are built in."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The options that say what is trained; None: what the model usually has."""

    model: str
    data: str | None
    layers: int | None
    width: int | None
    heads: int | None
    batch: int | None
    seq: int | None
    size: int | None
    classes: int | None
    workers: int | None = None

    @property
    def kind(self) -> str:
        """``"gpt"``, ``"resnet"`` or ``"dranet"``. Raises InputError for a model that is none of them."""
        kind = self.model.rstrip("0123456789-").lower()
        if kind not in ("resnet", "dranet") and not kind.startswith("gpt"):
            raise InputError(
                f"{self.model} was asked for, which `train` does not know; it is gpt, resnet or dranet with --layers, "
                "or a published size, such as gpt2-124m, resnet50 or dranet101"
            )
        return kind if kind in ("resnet", "dranet") else "gpt"

    @property
    def source(self) -> str:
        """Where data come from."""
        return self.data or {"gpt": "stdlib", "resnet": "digits", "dranet": "shapes"}[self.kind]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The other options of ``tapestream train``, as they are written."""

    budget: str | None
    host_budget: str | None
    home: str
    folder: Path | None
    steps: int
    dtype: str
    device: str
    optimizer: str
    update: str
    rate: float
    seed: int
    metrics: Path
    saves: Path | None
    save_every: int
    resume: bool
    json: bool

    def check(self) -> None:
        """Raise InputError for a value that cannot be, and for an option that has no effect beside the others."""
        checks.check_dtype(self.dtype)
        checks.check_optimizer(self.optimizer)
        checks.check_update(self.update)
        checks.maybe_size("--budget", self.budget)
        checks.check_homes(checks.known_device(self.device), self.home, self.folder, self.host_budget)
        if not math.isfinite(self.rate):
            raise InputError(f"--rate {self.rate} was asked for; give a number, such as --rate 3e-4")
        if self.metrics.is_dir():
            raise InputError(f"--metrics {self.metrics} is a folder; name a file in it")
        if self.saves is None and self.resume:
            raise InputError("--resume was asked for without --saves; name the folder of the saves")
        if self.saves is None and self.save_every:
            raise InputError(
                f"--save-every {self.save_every} has no effect without --saves; name a folder for the saves"
            )
        if self.saves is not None and self.saves.exists() and not self.saves.is_dir():
            raise InputError(f"--saves {self.saves} is a file; name a folder")


def check_network(wanted: NetworkOptions) -> None:
    """Raise InputError where options are not enough, contradict each other, or name data that are not there."""
    if wanted.kind == "gpt":
        text_shape(wanted)
        if wanted.source != "stdlib" and not Path(wanted.source).exists():
            raise InputError(
                f"no file or folder {wanted.source}; give --data the path of a text file or of a folder with text files"
            )
        return
    backbone = backbone_of(wanted)
    _check_images(wanted)
    if wanted.kind == "dranet":
        segmenting(backbone, wanted, wanted.classes or 2)
    else:
        check_norms(backbone, wanted.batch or 16, side_of(wanted, backbone))


def text_shape(wanted: NetworkOptions) -> GPTShape:
    """The GPT, of bytes."""
    _refuse(wanted, size=wanted.size, classes=wanted.classes, workers=wanted.workers)
    return gpt_shape(
        wanted.model, wanted.layers, wanted.width, wanted.heads, context=wanted.seq or 256, vocabulary=BYTES
    )


def side_of(wanted: NetworkOptions, backbone: ResNetConfig) -> int:
    """Pixels of an image's side."""
    usual = 64 if wanted.kind == "dranet" else 32 if backbone.stem == "cifar" else 224
    return wanted.size or (8 if wanted.source == "digits" else usual)


def _refuse(wanted: NetworkOptions, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} {value} was asked for; it does not apply to {wanted.model}: leave it out")


def backbone_of(wanted: NetworkOptions) -> ResNetConfig:
    """The ResNet that the options name, before it is known what its images are."""
    _refuse(wanted, seq=wanted.seq, heads=wanted.heads)
    name, layers, width = wanted.model.lower(), wanted.layers, wanted.width
    if name not in ("resnet", "dranet"):
        if layers:
            raise InputError(f"{name} has its own depth; leave --layers out, or write '{name.rstrip('0123456789-')}'")
        size = name.replace("dranet", "resnet")
        if size.replace("-", "") not in RESNET_SIZES:
            known = ", ".join(RESNET_SIZES).replace("resnet", wanted.kind)
            raise InputError(f"{name} was asked for; choose one of {known}, or '{wanted.kind}' with --layers")
        named = ResNetConfig.named(size)
        return named if width is None else replace(named, width=width)
    if layers is None:
        raise InputError(f"'{name}' needs --layers, for example --layers 110; or name a size: {name}50")
    return (ResNetConfig.deep if name == "dranet" else ResNetConfig.cifar)(layers, width=width or 16)


def segmenting(backbone: ResNetConfig, wanted: NetworkOptions, classes: int) -> DRANetConfig:
    """The DRANet on this backbone."""
    try:
        return DRANetConfig.on(backbone, classes)
    except InputError as error:
        if not backbone.features[-1] % 64:
            raise
        fitting = (w for w in range(backbone.width, backbone.width + 65) if not _with(backbone, w).features[-1] % 64)
        raise InputError(
            f"--width {backbone.width} was asked for: {wanted.model} then ends in {backbone.features[-1]} channels, "
            f"which its attentions cannot divide; the next width that works: --width {next(fitting)}"
        ) from error


def _with(backbone: ResNetConfig, width: int) -> ResNetConfig:
    return replace(backbone, width=width)


def check_norms(backbone: ResNetConfig, batch: int, size: int) -> None:
    """Raise InputError where the last norms have one value per channel, of which they can take no variance."""
    stride = backbone.stem_stride * 2 ** (len(backbone.stages) - 1)
    stride = min(stride, backbone.output_stride or stride)
    if batch == 1 and size <= stride:
        raise InputError(
            f"--batch 1 was asked for with --size {size}: the last stage has one pixel, and norms over a batch need "
            f"more than one value per channel in training; use --batch 2, or --size {stride + 1}"
        )


def _check_images(wanted: NetworkOptions) -> None:
    data, segments = wanted.source, wanted.kind == "dranet"
    owner = {"stdlib": "gpt", "digits": "resnet", "shapes": "dranet"}.get(data, wanted.kind)
    if owner != wanted.kind:
        raise InputError(
            f"--data {data} was asked for, which is for {owner}; use --data {'shapes' if segments else 'digits'}, or a "
            "folder"
        )
    if data in CLASSES:
        if wanted.classes not in (None, CLASSES[data]):
            raise InputError(f"--classes {wanted.classes} was asked for; {data} has {CLASSES[data]}: leave it out")
    elif not Path(data).is_dir():
        raise InputError(f"no folder {data}; give --data the path of a folder with images")
    elif segments and wanted.classes is None:
        raise InputError(f"--data {data} holds masks; give --classes, the number of labels in them")
