"""Folders of images: with a subfolder per class, or with a mask per image."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tapestream.errors import InputError

IGNORED = 255
"""The label of pixels that count for nothing."""
_ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"))


class ClassFolders:
    """A folder with one subfolder of images per class; each image is scaled and cropped to ``size``.

    Raises InputError where there are none, or when one cannot be read.
    """

    channels = 3

    def __init__(self, folder: Path, size: int) -> None:
        _check_folder(folder)
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        images = [_images_in(folder / name) for name in names]
        found = [(path, label) for label, paths in enumerate(images) for path in paths]
        if not found:
            raise InputError(
                f"{folder} has no subfolders with images ({', '.join(sorted(_ENDINGS))}); put the images of each class "
                "into a subfolder of their own"
            )
        empty = [name for name, paths in zip(names, images, strict=True) if not paths]
        if empty:
            raise InputError(
                f"{len(empty)} of the {len(names)} classes in {folder} have no images, such as {empty[0]!r}; put some "
                "into its subfolder, or remove it"
            )
        if len(names) == 1:
            raise InputError(
                f"{folder} has one class only, {names[0]!r}; name the folder whose subfolders are the classes"
            )
        self.classes, self._found, self._size = len(names), found, size
        self.identity = {"class_names": _checksum(names), **_identity(folder, [path for path, _ in found])}

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
    """A folder with ``images`` and, of the same names in the same subfolders, ``masks`` whose pixels are labels below
    ``classes`` or 255 (counts for nothing). Samples are random crops of ``size``, padded where an image is smaller.

    Raises InputError where there are none, one has no partner, or two, or one of another size (all are looked at), or
    when a mask that is read holds another label.
    """

    channels = 3

    def __init__(self, folder: Path, size: int, classes: int) -> None:
        _check_folder(folder)
        images, masks = (_by_name(folder / name) for name in ("images", "masks"))
        if not images:
            raise InputError(f"{folder / 'images'} holds no images ({', '.join(sorted(_ENDINGS))}); put them there")
        _check_pairs(images, masks, "images", "mask", folder / "masks")
        _check_pairs(masks, images, "masks", "image", folder / "images")
        self.classes, self._size = classes, size
        self._found = [(path, masks[name]) for name, path in sorted(images.items())]
        for image, mask in self._found:
            sizes = _size(image), _size(mask)
            if sizes[0] != sizes[1]:
                raise InputError(
                    f"{mask} is {sizes[1][0]} x {sizes[1][1]} pixels and its image {image} {sizes[0][0]} x "
                    f"{sizes[0][1]}; a mask has one label for each pixel of the image"
                )
        self.identity = _identity(folder, [path for pair in self._found for path in pair])

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


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"no folder {folder}; give the path of a folder with images")


def _images_in(folder: Path) -> list[Path]:
    found = folder.rglob("*") if folder.is_dir() else ()
    return sorted(path for path in found if path.suffix.lower() in _ENDINGS and path.is_file())


def _identity(folder: Path, files: list[Path]) -> dict[str, int]:
    """What tells other files, or files that were changed, without reading them."""
    return {
        "file_names": _checksum(path.relative_to(folder) for path in files),
        "file_sizes": _checksum(path.stat().st_size for path in files),
    }


def _checksum(values: Iterable[object]) -> int:
    return zlib.crc32("\0".join(map(str, values)).encode(errors="surrogateescape"))


def _by_name(folder: Path) -> dict[str, Path]:
    """Images by their path in the folder, without its ending, which an image and its mask may differ in."""
    found: dict[str, Path] = {}
    for path in _images_in(folder):
        name = str(path.relative_to(folder).with_suffix(""))
        if name in found:
            raise InputError(
                f"{found[name]} and {path} differ in their endings only, so that images and masks cannot be paired; "
                "rename or remove one"
            )
        found[name] = path
    return found


def _check_pairs(some: dict[str, Path], others: dict[str, Path], kind: str, partner: str, there: Path) -> None:
    lacking = [path for name, path in some.items() if name not in others]
    if lacking:
        raise InputError(
            f"{len(lacking)} of {len(some)} {kind} have no {partner}, such as {lacking[0]}; put one of the same name "
            f"into {there}, in the same subfolder, or leave it out"
        )


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
