"""safetensors files written and read tensor by tensor, with checksums; neither takes memory of the file's size.

The format (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header, the bytes.
The library of that name makes all bytes at once to write them, and maps files so that they count as memory taken.
"""

import json
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tapestream.errors import InputError, StorageError
from tapestream.storage.new_file import new_file
from tapestream.storage.read_ahead import Parts, pieces_of

_SMALL_NBYTES = 4096
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
RESERVED = "__metadata__"
"""What the format keeps for itself among the names of tensors."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], written: Callable[[int], None],
    parts: Parts = lambda tensor: (tensor,),
) -> dict[str, int]:  # fmt: skip
    """Write a new file; returns the checksum of each tensor. ``written`` is told bytes as they go; ``parts``: tensors
    whose elements, one after the other, are those of the one given.

    Takes no memory beyond buffers and one tensor, and that only if it does not lie in row-major order. Reading, adding
    up and writing go on at once. The file is on the disk when this returns.

    Raises InputError for a dtype that the format lacks, StorageError when the disk fails.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise InputError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files cannot hold; convert it first"
            )
    header: dict[str, object] = {RESERVED: {"format": "pt"}}
    end = 0
    for name, t in tensors.items():
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    sums = {name: _described(tensor) for name, tensor in tensors.items()}
    with (
        new_file(path, end) as file, ThreadPoolExecutor(1, "tapestream-sum") as thread,
        closing(pieces_of(tensors.items(), parts)) as pieces,
    ):  # fmt: skip
        file.write(_bytes_of(len(text).to_bytes(8, "little") + text))
        for name, piece in pieces:
            if piece.numel() > _SMALL_NBYTES:
                adding = thread.submit(zlib.crc32, piece.numpy().data, sums[name])
                file.write(piece)
                sums[name] = adding.result()
            else:
                file.write(piece)
                sums[name] = zlib.crc32(piece.numpy().data, sums[name])
            written(piece.numel())
    return sums


def write_text(path: Path, text: str) -> None:
    """Write a new file; it is on the disk when this returns. Raises StorageError when the disk fails."""
    with new_file(path) as file:
        file.write(_bytes_of(text.encode()))


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of its dtype, shape and bytes."""
    crc32 = _described(tensor)
    for _, piece in pieces_of([("", tensor)]):
        crc32 = zlib.crc32(piece.numpy().data, crc32)
    return crc32


def read_tensors(path: Path, *, writable: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file: its bytes in the page cache, which must not be written to; small ones are copies.

    Takes no memory, and none of what limits on a process count. ``writable``: what is written stays in memory, and
    never reaches the file; limits on a process may count the file's size then. Raises StorageError, which names the
    file, where it is missing, cut short or something else.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise StorageError(f"{path} is no file of tensors but a folder, a pipe or a device")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"it ends after {size} bytes")
            header = json.loads(file.read(length))
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
        header.pop(RESERVED, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a tensor does not know that it cannot be written to
            return {name: _view(mapping, 8 + length, entry) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing") from error
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]  # PyTorch adds a trace of its own
        raise StorageError(f"{path} is not a whole safetensors file ({said})") from error


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _described(tensor: torch.Tensor) -> int:
    return zlib.crc32(f"{_NAMES[tensor.dtype]}{list(tensor.shape)}".encode())


def _view(mapping: mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    first, last = (start + offset for offset in entry["data_offsets"])
    if not start <= first <= last <= len(mapping):
        raise ValueError(f"it ends after {len(mapping)} bytes, {last} are needed")
    if any(size < 0 for size in entry["shape"]):
        raise ValueError(f"a tensor of shape {entry['shape']}")
    dtype = _DTYPES[entry["dtype"]]
    # Of its own, since a deep copy of a view is one of all that it is a view of.
    piece = torch.empty(0, dtype=torch.uint8, device="cpu")
    if last > first:
        piece = torch.frombuffer(mapping, dtype=torch.uint8, count=last - first, offset=first)
    # What is small is often kept as it is given (Adam's step); another writer's file may have a header of odd length.
    if len(piece) <= _SMALL_NBYTES or first % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry["shape"])
