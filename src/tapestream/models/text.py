"""Text as bytes, a vocabulary of 256: the running interpreter's own library, or a user's files."""

import sysconfig
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tapestream.errors import InputError
from tapestream.models._random import keyed_generator


def standard_library_bytes() -> Tensor:
    """All Python source of the running interpreter's standard library, uint8, in the order of the paths.

    Test folders and installed packages are left out. Raises InputError where the interpreter has no source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    data = _joined(path for path in sorted(root.rglob("*.py")) if not _is_left_out(path.relative_to(root).parts[:-1]))
    if not data.numel():
        raise InputError(f"no .py files of the standard library in {root}; give your own text with load_bytes(path)")
    return data


def load_bytes(path: str | PathLike[str]) -> Tensor:
    """The bytes of one file, or of all text files of a folder and its subfolders in the order of their paths, as uint8.

    In a folder, hidden files and files with a zero byte (binary ones) are passed over. Raises InputError where there
    is nothing to read.
    """
    path = Path(path)
    if path.is_file():
        data = _joined([path])
    elif path.is_dir():
        found = (file for file in sorted(path.rglob("*")) if file.is_file())
        data = _joined(
            (file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)),
            binary=False,
        )
    else:
        raise InputError(f"no file or folder {path}; give the path of a text file or of a folder with text files")
    if not data.numel():
        raise InputError(f"{path} holds no text; give a file that is not empty or a folder with text files")
    return data


def _is_left_out(folders: tuple[str, ...]) -> bool:
    return any(
        folder in {"test", "tests", "site-packages", "dist-packages"} or folder.endswith("_test") for folder in folders
    )


def _joined(files: Iterable[Path], *, binary: bool = True) -> Tensor:
    joined = bytearray()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}; make it readable or leave it out") from error
        if binary or b"\0" not in content:
            joined += content
    # frombuffer refuses an empty buffer
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


class Batches:
    """An endless iterator of (tokens, targets), both int64 (batch, sequence); targets are the tokens one byte later.

    Batch number i takes its places in ``data`` (one-dimensional uint8) from (seed, i) alone: the same whatever was
    drawn before, and resumed with one number, from the same text, as a checksum of it tells. Raises InputError where
    ``data`` is too short for one sequence.
    """

    def __init__(self, data: Tensor, batch: int, sequence: int, seed: int = 0) -> None:
        if data.dim() != 1 or data.dtype != torch.uint8:
            raise InputError(
                f"Batches: data must be one-dimensional uint8, not {data.dtype} of shape {tuple(data.shape)}"
            )
        if batch < 1 or sequence < 1:
            raise InputError(f"Batches: batch and sequence must be at least 1, not {batch} and {sequence}")
        if data.numel() <= sequence:
            raise InputError(
                f"Batches: a sequence of {sequence} needs {sequence + 1} bytes of text, there are {data.numel()}; "
                f"give more text or a sequence of at most {data.numel() - 1}"
            )
        self._data, self._batch, self._sequence, self._seed = data, batch, sequence, seed
        self._drawn = 0
        self._checksum: int | None = None  # of the text, when it is first asked for

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = keyed_generator(self._seed, self._drawn)
        starts = torch.randint(self._data.numel() - self._sequence, (self._batch, 1), generator=generator, device="cpu")
        window = self._data[starts + torch.arange(self._sequence + 1, device="cpu")].long()
        self._drawn += 1
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        """Where the iterator stands, and what it iterates over: plain integers."""
        return {"drawn": self._drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken; InputError where it was taken from other data or shapes. States of
        earlier versions have no checksum, and fit any text of their length."""
        mine = self._identity()
        expected = {"drawn": state.get("drawn"), **{name: mine[name] for name in mine if name in state}}
        if (
            not mine.keys() - {"checksum"} <= state.keys()
            or state != expected
            or not isinstance(state["drawn"], int)
            or state["drawn"] < 0
        ):
            raise InputError(
                f"Batches: the state {state} does not fit an iterator of {mine}; "
                "make it with the same data, byte for byte, batch, sequence and seed"
            )
        self._drawn = state["drawn"]

    def _identity(self) -> dict[str, int]:
        if self._checksum is None:
            self._checksum = zlib.crc32(self._data.cpu().contiguous().numpy().data)
        return {
            "nbytes": self._data.numel(), "batch": self._batch, "sequence": self._sequence, "seed": self._seed,
            "checksum": self._checksum,
        }  # fmt: skip
