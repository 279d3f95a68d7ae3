"""What ``train`` trains: the network that its options name, and the data that it is trained on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tapestream.cli.chosen import config_of
from tapestream.cli.loop import Batch, Config, Job
from tapestream.cli.train_options import NetworkOptions, backbone_of, check_network, segmenting, side_of, text_shape
from tapestream.errors import InputError
from tapestream.models import (
    Batches,
    ClassFolders,
    Digits,
    DRANetConfig,
    GPTConfig,
    ImageBatches,
    MaskFolders,
    Shapes,
    load_bytes,
    standard_library_bytes,
)
from tapestream.units import format_nbytes


@dataclass(frozen=True, slots=True)
class Task:
    """``config``: the network's shape, ``data``: where its data come from, ``batch``: samples a step, ``length``:
    tokens of a sequence or pixels of an image's side."""

    config: Config
    data: str
    batch: int
    length: int


def task_of(wanted: NetworkOptions) -> Task:
    """Raises InputError where the options are not enough, contradict each other, or name data that cannot be used."""
    check_network(wanted)
    data = wanted.source
    if wanted.kind == "gpt":
        config = config_of(text_shape(wanted))
        return Task(config, data, wanted.batch or 2, config.context)
    segments = wanted.kind == "dranet"
    backbone = backbone_of(wanted)
    size = side_of(wanted, backbone)
    samples = _samples(data, size, wanted.classes, segments)
    if wanted.classes is not None and wanted.classes != samples.classes:
        raise InputError(f"--classes {wanted.classes} was asked for; {data} has {samples.classes}: leave it out")
    backbone = replace(backbone, channels=samples.channels, classes=samples.classes)
    if segments:
        return Task(segmenting(backbone, wanted, samples.classes), data, wanted.batch or 4, size)
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
            f"{format_nbytes(job.batch * each)}, but the budget, for images and all that is made of them, is "
            f"{format_nbytes(limit_nbytes)}; far fewer than --batch {max(1, limit_nbytes // each)} fit"
        )


def text_of(data: str) -> Tensor:
    """The bytes of ``--data``."""
    return standard_library_bytes() if data == "stdlib" else load_bytes(Path(data))


def _samples(data: str, size: int, classes: int | None, segments: bool) -> ClassFolders | Digits | MaskFolders | Shapes:
    if not segments:
        return Digits(size) if data == "digits" else ClassFolders(Path(data), size)
    if data == "shapes":
        return Shapes(size)
    assert classes is not None  # see `check_network`
    return MaskFolders(Path(data), size, classes)
