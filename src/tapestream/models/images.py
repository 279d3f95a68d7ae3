"""Images for classifiers and for segmentation: scikit-learn's digits, folders, shapes that are drawn as they are asked
for. Batches come from (seed, number) alone, as those of text do."""

import atexit
import itertools
import signal
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tapestream.errors import InputError
from tapestream.models._random import keyed_generator

IGNORED = 255
"""The label of pixels that count for nothing."""
_ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"))


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
        self._ahead: _Ahead | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._workers and self._ahead is None:
            alone = ImageBatches(self._samples, self._batch, self._seed)
            self._ahead = _Ahead(alone, itertools.count(self._drawn), self._workers)
        found = self[self._drawn] if self._ahead is None else next(self._ahead.batches)
        if isinstance(found, InputError):
            raise found
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
        """Where the iterator stands, and what it iterates over: plain integers."""
        return {"drawn": self._drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken; InputError where it was taken from other data."""
        if {**state, "drawn": 0} != {"drawn": 0, **self._identity()} or state["drawn"] < 0:
            raise InputError(
                f"ImageBatches: the state {state} does not fit an iterator of {self._identity()}; make it with the "
                "same data, batch and seed"
            )
        self._drawn = state["drawn"]
        self._ahead = None

    def _identity(self) -> dict[str, int]:
        return {"samples": len(self._samples), "batch": self._batch, "seed": self._seed}


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


class ClassFolders:
    """A folder with one subfolder of images per class; each image is scaled and cropped to ``size``.

    Raises InputError where there are none, or when one cannot be read.
    """

    channels = 3

    def __init__(self, folder: Path, size: int) -> None:
        _check_folder(folder)
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        found = [(path, label) for label, name in enumerate(names) for path in _images_in(folder / name)]
        if not found:
            raise InputError(
                f"{folder} has no subfolders with images ({', '.join(sorted(_ENDINGS))}); put the images of each class "
                "into a subfolder of their own"
            )
        if len(names) == 1:
            raise InputError(
                f"{folder} has one class only, {names[0]!r}; name the folder whose subfolders are the classes"
            )
        self.classes, self._found, self._size = len(names), found, size

    def __len__(self) -> int:
        return len(self._found)

    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image (3, size, size), label ()."""
        path, label = self._found[number]
        image = _pixels(path)
        height, width = image.shape[-2:]
        scale = self._size / min(height, width)
        scaled = (max(self._size, round(height * scale)), max(self._size, round(width * scale)))
        image = F.interpolate(image[None], scaled, mode="bilinear", antialias=True)[0]
        top, left = (scaled[0] - self._size) // 2, (scaled[1] - self._size) // 2
        return image[:, top : top + self._size, left : left + self._size], torch.tensor(label)


class MaskFolders:
    """A folder with ``images`` and, of the same names, ``masks`` whose pixels are labels below ``classes`` or 255
    (counts for nothing). Samples are random crops of ``size``, padded where an image is smaller.

    Raises InputError where there are none, a mask is missing or of another size (all are looked at), or when one that
    is read holds another label.
    """

    channels = 3

    def __init__(self, folder: Path, size: int, classes: int) -> None:
        _check_folder(folder)
        images = {path.stem: path for path in _images_in(folder / "images")}
        masks = {path.stem: path for path in _images_in(folder / "masks")}
        if not images:
            raise InputError(f"{folder / 'images'} holds no images ({', '.join(sorted(_ENDINGS))}); put them there")
        lacking = [path for stem, path in images.items() if stem not in masks]
        if lacking:
            raise InputError(
                f"{len(lacking)} of {len(images)} images have no mask, such as {lacking[0]}; put one of the same name "
                f"into {folder / 'masks'}"
            )
        self.classes, self._size = classes, size
        self._found = [(path, masks[stem]) for stem, path in sorted(images.items())]
        for image, mask in self._found:
            sizes = _size(image), _size(mask)
            if sizes[0] != sizes[1]:
                raise InputError(
                    f"{mask} is {sizes[1][0]} x {sizes[1][1]} pixels and its image {image} {sizes[0][0]} x "
                    f"{sizes[0][1]}; a mask has one label for each pixel of the image"
                )

    def __len__(self) -> int:
        return len(self._found)

    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image (3, size, size), labels (size, size)."""
        image, mask = self._found[number]
        pixels, labels = _pixels(image), _labels(mask)
        wrong = labels[(labels >= self.classes) & (labels != IGNORED)]
        if wrong.numel():
            raise InputError(
                f"{mask} holds the label {int(wrong.max())}, but there are {self.classes} classes, 0 to "
                f"{self.classes - 1}, and {IGNORED} for pixels that count for nothing; correct it or give --classes"
            )
        height, width = labels.shape
        space = max(0, self._size - width), max(0, self._size - height)
        pixels = F.pad(pixels, (0, space[0], 0, space[1]))
        labels = F.pad(labels, (0, space[0], 0, space[1]), value=IGNORED)
        top, left = (
            int(torch.randint(max(0, n - self._size) + 1, (), generator=generator, device="cpu"))
            for n in (height, width)
        )
        window = (slice(top, top + self._size), slice(left, left + self._size))
        return pixels[(..., *window)], labels[window]


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
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"no folder {folder}; give the path of a folder with images")


def _images_in(folder: Path) -> list[Path]:
    found = folder.rglob("*") if folder.is_dir() else ()
    return sorted(path for path in found if path.suffix.lower() in _ENDINGS and path.is_file())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The image, of which only the head is read yet."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images are read by Pillow, which is not installed: pip install 'tapestream[demo]'") from error
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError) as error:  # the latter is what Pillow makes of some broken files
        raise InputError(f"cannot read the image {path} ({error}); replace it or leave it out") from error


def _size(path: Path) -> tuple[int, int]:
    """Width and height."""
    with _opened(path) as image:
        return image.width, image.height


def _pixels(path: Path) -> Tensor:
    """(3, height, width), from -1 to 1."""
    with _opened(path) as image:
        data = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        return data.view(image.height, image.width, 3).permute(2, 0, 1) / 127.5 - 1


def _labels(path: Path) -> Tensor:
    """(height, width), the numbers as they are stored."""
    with _opened(path) as mask:
        if mask.mode not in ("L", "P"):
            raise InputError(
                f"the mask {path} has pixels of mode {mask.mode}; save it with one number of 8 bits per pixel"
            )
        data = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8)
        return data.view(mask.height, mask.width).long()
