"""`Cell`: memory that a computation writes into, other than its arguments and what it makes; and what it held."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_set_version: Any = torch._C._autograd._unsafe_set_version_counter
Version: TypeAlias = "tuple[weakref.ref[torch.Tensor], int]"
"""A tensor, and the version that it had at some moment."""


class Cell:
    """A storage, which is not held, and the tensors through which it was written."""

    __slots__ = ("_storage", "_tensors", "key", "nbytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.key, self.nbytes = storage._cdata, storage.nbytes()
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """It was written through ``tensor``."""
        whole = tensor if tensor._base is None else tensor._base
        self._tensors.setdefault(id(whole), weakref.ref(whole))

    @property
    def alive(self) -> bool:
        """Whether anybody holds the memory."""
        return not self._storage.expired()  # type: ignore[no-untyped-call]

    def versions(self) -> list["Version"]:
        """Those of its tensors, as far as they are still there."""
        there = ((reference, reference()) for reference in self._tensors.values())
        return [(one, t._version) for one, t in there if t is not None and not t.is_inference()]

    def read(self) -> torch.Tensor:
        """A copy of its bytes."""
        return self._bytes().clone()

    def write(self, content: torch.Tensor) -> None:
        """Put ``content`` there. No version counter tells of it."""
        self._bytes().copy_(content)

    def _bytes(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "a cell is used only while somebody holds its memory"
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def key_of(tensor: torch.Tensor) -> int | None:
    """Equal for tensors of one memory; None for tensors without any (sparse ones, those of subclasses)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def among(cells: Sequence[Cell], tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is one of these cells."""
    return bool(cells) and any(cell.key == key_of(tensor) for cell in cells)


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``cells`` held at one moment, byte by byte, and the versions of their tensors then."""

    cells: tuple[Cell, ...]
    copies: tuple[torch.Tensor, ...]
    versions: Sequence["Version"] = ()

    @classmethod
    def take(cls, cells: Sequence[Cell]) -> "Contents":
        """What they hold now; those that are gone are left out."""
        there = tuple(cell for cell in cells if cell.alive)
        return cls(there, tuple(cell.read() for cell in there), [v for cell in there for v in cell.versions()])

    def also(self, other: "Contents") -> "Contents":
        """With what ``other`` has of cells that are none of these."""
        known = {cell.key for cell in self.cells}
        new = [(cell, copy) for cell, copy in zip(other.cells, other.copies, strict=True) if cell.key not in known]
        cells = (*self.cells, *(cell for cell, _ in new))
        return Contents(cells, (*self.copies, *(copy for _, copy in new)), (*self.versions, *other.versions))

    def show(self) -> None:
        """Let the cells hold it again; versions stay."""
        for cell, copy in zip(self.cells, self.copies, strict=True):
            if cell.alive:
                cell.write(copy)

    def put_back(self) -> None:
        """Let all be as it was: to who has saved one of the tensors, nothing has happened."""
        self.show()
        for reference, version in self.versions:
            tensor = reference()
            if tensor is not None:
                _set_version((tensor,), (version,))

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Inside, the cells hold this; afterwards all is as it was before."""
        now = Contents.take(self.cells)
        try:
            self.show()
            yield
        finally:
            now.put_back()


def kept_nbytes(cells: Iterable[Sequence[Cell]]) -> int:
    """What recomputes take beside all else: for each stage a copy of what its cells held, and one of what the largest
    are exchanged with."""
    each = [sum(cell.nbytes for cell in own) for own in cells]
    return sum(each) + max(each, default=0)
