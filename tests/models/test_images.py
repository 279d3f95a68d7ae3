"""Images: what is read and drawn, batches that are the same each time, and what is said of bad folders."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tapestream.errors import InputError
from tapestream.models import ClassFolders, Digits, ImageBatches, MaskFolders, Shapes

Image = pytest.importorskip("PIL.Image")


def write(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numpy.asarray(pixels, dtype=numpy.uint8)).save(path)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_class_folders_scale_and_crop_the_middle(tmp_path: Path) -> None:
    wide = numpy.zeros((4, 8, 3))
    wide[:, 2:6] = 255  # the middle square
    write(tmp_path / "b" / "wide.png", wide)
    write(tmp_path / "a" / "deep" / "small.PNG", numpy.full((2, 2, 3), 51))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    samples = ClassFolders(tmp_path, 4)
    assert (len(samples), samples.classes) == (2, 2)
    image, label = samples.sample(0, generator())
    assert label.item() == 0
    torch.testing.assert_close(image, torch.full((3, 4, 4), 51 / 127.5 - 1))
    image, label = samples.sample(1, generator())
    assert label.item() == 1
    assert torch.equal(image, torch.ones(3, 4, 4))


def test_mask_folders_crop_both_alike_and_pad(tmp_path: Path) -> None:
    numbers = numpy.arange(36).reshape(6, 6)
    write(tmp_path / "images" / "x.png", numpy.stack([numbers] * 3, -1))
    write(tmp_path / "masks" / "x.png", numbers)
    samples = MaskFolders(tmp_path, 4, classes=36)
    corners = set()
    for seed in range(40):
        image, labels = samples.sample(0, torch.Generator().manual_seed(seed))
        assert image.shape == (3, 4, 4)
        torch.testing.assert_close(image[0], labels / 127.5 - 1)
        corners.add(int(labels[0, 0]))
    assert corners == {0, 1, 2, 6, 7, 8, 12, 13, 14}
    image, labels = MaskFolders(tmp_path, 8, classes=36).sample(0, generator())
    assert image.shape == (3, 8, 8)
    assert (labels == 255).sum() == 64 - 36


def test_masks_of_subfolders_go_with_the_images_of_the_same_subfolder(tmp_path: Path) -> None:
    for number, name in enumerate(("a/0", "a/1", "b/0", "b/1", "0")):
        write(tmp_path / "images" / f"{name}.jpg", numpy.full((4, 4, 3), 60 * number))
        write(tmp_path / "masks" / f"{name}.png", numpy.full((4, 4), number))
    samples = MaskFolders(tmp_path, 4, classes=5)
    assert len(samples) == 5
    seen = set()
    for number in range(5):
        image, labels = samples.sample(number, generator())
        seen.add(int(labels[0, 0]))
        torch.testing.assert_close(image[0], 60 * labels / 127.5 - 1, atol=0.02, rtol=0)
    assert seen == {0, 1, 2, 3, 4}


def bad_folders(root: Path) -> dict[str, Any]:
    white = numpy.full((4, 4, 3), 255)
    (root / "empty").mkdir()
    write(root / "lacking" / "images" / "x.png", white)
    write(root / "elsewhere" / "images" / "a" / "x.png", white)
    write(root / "elsewhere" / "masks" / "b" / "x.png", white)
    for name in ("images/x.png", "masks/x.png", "masks/a/y.png"):
        write(root / "more" / name, white)
    for name in ("images/x.png", "images/x.jpg", "masks/x.png"):
        write(root / "twice" / name, white)
    write(root / "sizes" / "images" / "x.png", white)
    write(root / "sizes" / "masks" / "x.png", numpy.zeros((4, 5)))
    write(root / "colour" / "images" / "x.png", white)
    write(root / "colour" / "masks" / "x.png", white)
    write(root / "labels" / "images" / "x.png", white)
    write(root / "labels" / "masks" / "x.png", numpy.full((4, 4), 7))
    write(root / "one" / "a" / "x.png", white)
    write(root / "hollow" / "a" / "x.png", white)
    (root / "hollow" / "b").mkdir()
    write(root / "broken" / "b" / "x.png", white)
    write(root / "broken" / "a" / "x.png", white)
    (root / "broken" / "a" / "x.png").write_bytes(b"\x89PNG and no more")
    return {
        "no folder": lambda: ClassFolders(root / "nowhere", 4),
        "no subfolders with images": lambda: ClassFolders(root / "empty", 4),
        "one class only, 'a'": lambda: ClassFolders(root / "one", 4),
        "1 of the 2 classes in .*hollow have no images, such as 'b'": lambda: ClassFolders(root / "hollow", 4),
        "holds no images": lambda: MaskFolders(root / "empty", 4, 2),
        "1 of 1 images have no mask": lambda: MaskFolders(root / "lacking", 4, 2),
        "1 of 1 images have no mask, such as .*a/x.png": lambda: MaskFolders(root / "elsewhere", 4, 2),
        "1 of 2 masks have no image, such as .*a/y.png": lambda: MaskFolders(root / "more", 4, 2),
        r"images/x.jpg and .*images/x.png differ in their": lambda: MaskFolders(root / "twice", 4, 2),
        r"5 x 4 pixels and its image .* 4 x 4": lambda: MaskFolders(root / "sizes", 4, 2),
        "mode RGB": lambda: MaskFolders(root / "colour", 4, 2).sample(0, generator()),
        "label 7, but there are 2 classes": lambda: MaskFolders(root / "labels", 4, 2).sample(0, generator()),
        "cannot read the image": lambda: ClassFolders(root / "broken", 4).sample(0, generator()),
    }


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    for said, use in bad_folders(tmp_path).items():
        with pytest.raises(InputError, match=said):
            use()


def test_shapes_are_what_their_labels_say() -> None:
    image, labels = Shapes(32).sample(5, generator())
    assert image.shape == (3, 32, 32)
    assert labels.shape == (32, 32)
    assert set(labels.unique().tolist()) <= {0, 1, 2, 3}
    assert image[:, labels == 0].std() < 0.3
    seen = {int(label) for seed in range(8)
            for label in Shapes(32).sample(0, torch.Generator().manual_seed(seed))[1].unique()}  # fmt: skip
    assert seen == {0, 1, 2, 3}


def test_digits_are_scikit_learns() -> None:
    digits = Digits()
    image, label = digits.sample(0, generator())
    assert (len(digits), image.shape, label.item()) == (1797, (1, 8, 8), 0)
    assert image.min() == -1
    assert image.max() <= 1
    assert Digits(16).sample(0, generator())[0].shape == (1, 16, 16)


def test_batches_are_deterministic_and_resume() -> None:
    left, right, other = (ImageBatches(Shapes(8), 3, seed=seed) for seed in (1, 1, 2))
    before = torch.get_rng_state()
    drawn = [next(left) for _ in range(3)]
    images, targets = drawn[0]
    assert images.shape == (3, 3, 8, 8)
    assert targets.dtype == torch.int64
    assert all(torch.equal(a, b) for batch in drawn for a, b in zip(batch, next(right), strict=True))
    assert not torch.equal(images, next(other)[0])
    assert torch.equal(before, torch.get_rng_state())
    state = right.state_dict()
    expected = next(right)
    left.load_state_dict(state)
    assert torch.equal(next(left)[0], expected[0])
    with pytest.raises(InputError, match="does not fit"):
        other.load_state_dict(state)
    with pytest.raises(InputError, match="at least 1"):
        ImageBatches(Shapes(8), 0)


def test_a_state_of_other_images_is_refused_by_what_differs(tmp_path: Path) -> None:
    white = numpy.full((4, 4, 3), 255)
    for name in ("a/0", "a/1", "b/0", "b/1"):
        write(tmp_path / f"{name}.png", white)
    state = ImageBatches(ClassFolders(tmp_path, 4), 2).state_dict()
    again = ImageBatches(ClassFolders(tmp_path, 4), 2)
    again.load_state_dict(state)
    again.load_state_dict({name: state[name] for name in ("drawn", "samples", "batch", "seed")})

    def refused(said: str) -> None:
        with pytest.raises(InputError, match=f"}}: {said} differ; make it with the same data"):
            ImageBatches(ClassFolders(tmp_path, 4), 2).load_state_dict(state)

    (tmp_path / "a").rename(tmp_path / "c")  # labels change places
    refused("class names, file names")
    (tmp_path / "c").rename(tmp_path / "a")
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "2.png")
    refused("file names")
    (tmp_path / "a" / "2.png").rename(tmp_path / "a" / "0.png")
    ImageBatches(ClassFolders(tmp_path, 4), 2).load_state_dict(state)
    write(tmp_path / "b" / "1.png", numpy.arange(192).reshape(8, 8, 3))
    refused("file sizes")


def test_a_state_of_other_masks_is_refused(tmp_path: Path) -> None:
    for name in ("images/a/0", "masks/a/0"):
        write(tmp_path / f"{name}.png", numpy.zeros((4, 4)))
    state = ImageBatches(MaskFolders(tmp_path, 4, 2), 2).state_dict()
    ImageBatches(MaskFolders(tmp_path, 4, 2), 2).load_state_dict(state)
    for kind in ("images", "masks"):
        (tmp_path / kind / "a").rename(tmp_path / kind / "b")
    with pytest.raises(InputError, match="file names differ"):
        ImageBatches(MaskFolders(tmp_path, 4, 2), 2).load_state_dict(state)
