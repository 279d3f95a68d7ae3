"""What ``train`` trains: the network that its options name, and the data that it is trained on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tapestream.cli.loop import Batch, Config, Job
from tapestream.cli.options import make_config
from tapestream.errors import InputError
from tapestream.models import (
    Batches,
    ClassFolders,
    Digits,
    DRANetConfig,
    GPTConfig,
    ImageBatches,
    MaskFolders,
    ResNetConfig,
    Shapes,
    load_bytes,
    standard_library_bytes,
)
from tapestream.units import format_nbytes

BYTES = 256
"""The vocabulary of text taken as bytes."""


@dataclass(frozen=True, slots=True)
class Wanted:
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


@dataclass(frozen=True, slots=True)
class Task:
    """``config``: the network's shape, ``data``: where its data come from, ``batch``: samples a step, ``length``:
    tokens of a sequence or pixels of an image's side."""

    config: Config
    data: str
    batch: int
    length: int


def task_of(wanted: Wanted) -> Task:
    """Raises InputError where the options are not enough, contradict each other, or name data that cannot be used."""
    kind = wanted.model.rstrip("0123456789-").lower()
    if kind not in ("resnet", "dranet") and not kind.startswith("gpt"):
        raise InputError(
            f"{wanted.model} was asked for, which `train` does not know; it is gpt, resnet or dranet with --layers, or "
            "a published size, such as gpt2-124m, resnet50 or dranet101"
        )
    if kind not in ("resnet", "dranet"):
        _refuse(wanted, size=wanted.size, classes=wanted.classes, workers=wanted.workers)
        length = wanted.seq or 256
        config = make_config(
            wanted.model, wanted.layers, wanted.width, wanted.heads, context=length, vocabulary=BYTES
        )  # fmt: skip
        return Task(config, wanted.data or "stdlib", wanted.batch or 2, length)
    _refuse(wanted, seq=wanted.seq, heads=wanted.heads)
    segments = kind == "dranet"
    backbone = _backbone(wanted, segments)
    data = wanted.data or ("shapes" if segments else "digits")
    size = wanted.size or (8 if data == "digits" else 64 if segments else 32 if backbone.stem == "cifar" else 224)
    samples = _samples(data, size, wanted.classes, segments)
    if wanted.classes is not None and wanted.classes != samples.classes:
        raise InputError(f"--classes {wanted.classes} was asked for; {data} has {samples.classes}: leave it out")
    backbone = replace(backbone, channels=samples.channels, classes=samples.classes)
    if segments:
        return Task(DRANetConfig.on(backbone, samples.classes), data, wanted.batch or 4, size)
    _check_norms(backbone, wanted.batch or 16, size)
    return Task(backbone, data, wanted.batch or 16, size)


def batches_of(job: Job, workers: int = 0) -> Iterable[Batch]:
    """Batches for `tapestream.cli.loop.run`, images from ``workers`` processes beside this one.

    Raises InputError for data that cannot be used."""
    if isinstance(job.config, GPTConfig):
        return Batches(text_of(job.data), job.batch, job.sequence, job.seed)
    segments = isinstance(job.config, DRANetConfig)
    samples = _samples(job.data, job.sequence, job.config.classes, segments)
    return ImageBatches(samples, job.batch, job.seed, workers)


def check_fits(job: Job, limit_nbytes: int) -> None:
    """Raise InputError where the images of a batch alone take more than a budget."""
    if isinstance(job.config, GPTConfig):
        return
    backbone = job.config.backbone if isinstance(job.config, DRANetConfig) else job.config
    each = torch.float32.itemsize * backbone.channels * job.sequence**2
    if job.batch * each > limit_nbytes:
        raise InputError(
            f"--batch {job.batch} was asked for: its images of {job.sequence} x {job.sequence} pixels alone take "
            f"{format_nbytes(job.batch * each)}, and the budget, for them and all that is made of them, is "
            f"{format_nbytes(limit_nbytes)}; far fewer than --batch {max(1, limit_nbytes // each)} fit"
        )


def text_of(data: str) -> Tensor:
    """The bytes of ``--data``."""
    return standard_library_bytes() if data == "stdlib" else load_bytes(Path(data))


def _refuse(wanted: Wanted, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} {value} was asked for; it means nothing to {wanted.model}: leave it out")


def _backbone(wanted: Wanted, segments: bool) -> ResNetConfig:
    name, layers, width = wanted.model.lower(), wanted.layers, wanted.width
    if name not in ("resnet", "dranet"):
        if layers:
            raise InputError(f"{name} has its own depth; leave --layers out, or write '{name.rstrip('0123456789-')}'")
        named = ResNetConfig.named(name.replace("dranet", "resnet"))
        return named if width is None else replace(named, width=width)
    if layers is None:
        raise InputError(f"'{name}' needs --layers, for example --layers 110; or name a size: {name}50")
    if segments:
        return ResNetConfig.deep(layers, width=width or 16)
    return ResNetConfig.cifar(layers, width=width or 16)


def _check_norms(backbone: ResNetConfig, batch: int, size: int) -> None:
    """Raise InputError where the last norms have one value per channel, of which they can take no variance."""
    stride = backbone.stem_stride * 2 ** (len(backbone.stages) - 1)
    stride = min(stride, backbone.output_stride or stride)
    if batch == 1 and size <= stride:
        raise InputError(
            f"--batch 1 was asked for with --size {size}, of which the last stage leaves one pixel: norms over a batch "
            f"need more than one value per channel in training; use --batch 2, or --size {stride + 1}"
        )


def _samples(data: str, size: int, classes: int | None, segments: bool) -> ClassFolders | Digits | MaskFolders | Shapes:
    kind = "dranet" if segments else "resnet"
    owner = {"stdlib": "gpt", "digits": "resnet", "shapes": "dranet"}.get(data, kind)
    if owner != kind:
        raise InputError(
            f"--data {data} was asked for, which is for {owner}; use --data {'shapes' if segments else 'digits'}, or a "
            "folder"
        )
    if not segments:
        return Digits(size) if data == "digits" else ClassFolders(Path(data), size)
    if data == "shapes":
        return Shapes(size)
    if classes is None:
        raise InputError(f"--data {data} holds masks; give --classes, the number of labels in them")
    return MaskFolders(Path(data), size, classes)
