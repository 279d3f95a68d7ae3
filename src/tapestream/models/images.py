"""Batches of images for classifiers and for segmentation, from (seed, number) alone, as those of text: of folders,
scikit-learn's digits, shapes that are drawn as they are asked for."""

import atexit
import itertools
import signal
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tapestream.errors import InputError
from tapestream.models._random import keyed_generator
from tapestream.system.signals import SAVING, STOPPING


class Samples(Protocol):
    """Numbered pairs: an image, float32 (channels, height, width) around 0, and its int64 target."""

    classes: int
    channels: int

    def __len__(self) -> int: ...
    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...


class ImageBatches(Dataset[tuple[Tensor, Tensor]]):
    """An endless iterator of (images, targets), batch by batch; samples are drawn with replacement.

    Batch number i is made from (seed, i) alone: the same whatever was drawn before, and resumed with one number.
    ``workers``: processes that make batches ahead (0: none), which leave signals to the one that they work for.
    """

    def __init__(self, samples: Samples, batch: int, seed: int = 0, workers: int = 0) -> None:
        if batch < 1 or workers < 0:
            raise InputError(f"ImageBatches: batch must be at least 1 and workers 0, not {batch} and {workers}")
        self._samples, self._batch, self._seed, self._workers = samples, batch, seed, workers
        self._drawn = 0
        self._failed = False
        self._ahead: _Ahead | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._workers and self._ahead is None:
            alone = ImageBatches(self._samples, self._batch, self._seed)
            self._ahead = _Ahead(alone, itertools.count(self._drawn), self._workers)
        self._failed = True
        found = self[self._drawn] if self._ahead is None else next(self._ahead.batches)
        if isinstance(found, InputError):
            raise found
        self._failed = False
        self._drawn += 1
        return found

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch ``number``."""
        generator = keyed_generator(self._seed, number)
        chosen = torch.randint(len(self._samples), (self._batch,), generator=generator, device="cpu").tolist()
        images, targets = zip(*(self._samples.sample(one, generator) for one in chosen), strict=True)
        return torch.stack(images), torch.stack(targets)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def state_dict(self) -> dict[str, int]:
        """Where the iterator stands, and what it iterates over: plain integers. Where the next batch could not be made,
        nothing of the sizes of files: mending one changes it."""
        state = {"drawn": self._drawn, **self._identity()}
        if self._failed:
            state.pop("file_sizes", None)
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken; InputError where it was taken from other data. What a state
        does not tell, as those of earlier versions the names and sizes of files, may differ."""
        mine = self._identity()
        fits = {"drawn", "samples", "batch", "seed"} <= state.keys() and state["drawn"] >= 0
        other = [name for name, value in state.items() if name != "drawn" and mine.get(name) != value]
        if other or not fits:
            what = ", ".join(name.replace("_", " ") for name in other) or "what they say"
            raise InputError(
                f"ImageBatches: the state {state} does not fit an iterator of {mine}: {what} differ; make it with the "
                "same data, batch and seed"
            )
        self._drawn = state["drawn"]
        self._failed = False
        self._ahead = None

    def _identity(self) -> dict[str, int]:
        found: dict[str, int] = getattr(self._samples, "identity", {})  # what is drawn or built in has none
        return {"samples": len(self._samples), "batch": self._batch, "seed": self._seed, **found}


class _Ahead:
    """Batches that workers make. They end with this object, or before the process does: Python would send them SIGTERM,
    which they do not hear, and wait for ever. They are told by something that the garbage collector cannot reach, as it
    takes the queues to them apart in any order. Their seed, which no batch depends on, is not drawn from PyTorch's own
    generator: a resumed run would draw it later than the run that never stopped."""

    def __init__(self, made: ImageBatches, numbers: Iterable[int], workers: int) -> None:
        batches: Any = iter(DataLoader(
            _Telling(made), batch_size=None, sampler=numbers, num_workers=workers, worker_init_fn=_hear_no_signals,
            generator=torch.Generator(torch.get_default_device()).manual_seed(0),
        ))  # fmt: skip
        self.batches = batches
        atexit.register(weakref.finalize(self, batches._shutdown_workers))


class _Telling(Dataset[Any]):
    """Batches, or what is wrong with them, for another process to raise: workers make their traceback the text."""

    def __init__(self, batches: ImageBatches) -> None:
        self._batches = batches

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor] | InputError:
        try:
            return self._batches[number]
        except InputError as error:
            return InputError(str(error))


class Digits:
    """scikit-learn's 1797 handwritten digits, 8x8 grey, scaled up to ``size``. Needs the extra ``[demo]``."""

    classes, channels = 10, 1

    def __init__(self, size: int = 8) -> None:
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise InputError(
                "the digits come with scikit-learn, which is not installed: pip install 'tapestream[demo]', or give a "
                "folder with one subfolder of images per class"
            ) from error
        found = load_digits()
        images = torch.from_numpy(found.images).float().unsqueeze(1) / 8 - 1
        self._images = images if size == 8 else F.interpolate(images, (size, size), mode="bilinear")
        self._labels = torch.from_numpy(found.target).long()

    def __len__(self) -> int:
        return len(self._labels)

    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image (1, size, size), label ()."""
        return self._images[number], self._labels[number]


class Shapes:
    """Discs, squares and diamonds of random place, size and colour on noise, drawn as they are asked for: endless data
    for segmentation. Classes: background and the three."""

    classes, channels = 4, 3

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return 2**31

    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image (3, size, size), labels (size, size)."""
        size = self._size
        image = torch.randn(3, size, size, generator=generator, device="cpu") / 4
        labels = torch.zeros(size, size, dtype=torch.int64)
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        for _ in range(3):
            kind = int(torch.randint(1, 4, (), generator=generator, device="cpu"))
            row, column, radius, *colour = torch.rand(6, generator=generator, device="cpu").tolist()
            down, across, reach = y - row * size, x - column * size, size * (0.1 + 0.2 * radius)
            distance = {
                1: (down**2 + across**2).sqrt(), 2: torch.maximum(down.abs(), across.abs()),
                3: down.abs() + across.abs(),
            }[kind]  # fmt: skip
            inside = distance <= reach
            labels[inside] = kind
            image[:, inside] = torch.tensor(colour)[:, None] * 2 - 1
        return image, labels


def _hear_no_signals(_: int) -> None:
    """Ctrl-C goes to every process of a terminal, and a service manager ends all at once: a worker that went would take
    the step at hand along, and its save. Whose parent is gone ends by itself."""
    for one in (*STOPPING, *SAVING):
        signal.signal(one, signal.SIG_IGN)
