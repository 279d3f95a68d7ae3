"""`Tape`: what backward asks for the saved tensors of a program, recorded in its first sweep or by a replay."""

import threading
from collections.abc import Callable, Container
from typing import TypeAlias

import torch

from tapestream.errors import GradientError

Saved: TypeAlias = list[tuple[torch.Tensor, int]]
"""What autograd saved in one operation, in order, without its graph; and the versions then."""
Handle: TypeAlias = int | tuple[torch.Tensor, int]
"""Where a saved tensor is found; or itself with its version, where nothing could make it again."""

_current_task: Callable[[], int] = torch._C._current_graph_task_id
PLACES = 1 << 20  # most tensors that one operation may save


class Tape:
    """Lives as long as some node of the program's graph that has not been reversed.

    ``saved``: by operation, what is there now. ``running``: an operation of users' code that runs, and what it has
    saved so far: it may differentiate inside. ``begins`` hears of each backward that asks. ``bring`` records the
    stretch of an operation again; None while the program runs; where something moves it is called for all operations
    before ``heed``, too, whatever is there. Plain autograd reverses operations in their order, last first, so of two
    operations that ask, the earlier one is done with what the later one had. An operation asks for each of its tensors
    once, as torch's own nodes do, and is done with it then (recurrent networks are many nodes, and free as they go);
    those of ``often`` (autograd.Functions) may ask as often as they like; None: all, while the program runs.
    """

    def __init__(self) -> None:
        self.saved: dict[int, Saved] = {}
        self.running: tuple[int, Saved] | None = None
        self.bring: Callable[[int], None] | None = None
        self.begins: Callable[[], None] | None = None
        self.heed = 0
        self.often: Container[int] | None = None
        self._asked, self._task = _NOBODY, -1  # the operation, and the backward, that asked last
        self._lock = threading.RLock()  # nodes on several devices are reversed by several threads

    def unpack(self, handle: Handle) -> torch.Tensor:
        """A saved tensor, for autograd. Raises GradientError where it would not be what it was."""
        if isinstance(handle, tuple):
            return still(*handle)
        operation, place = divmod(handle, PLACES)
        asked = self._asked
        if operation != asked.operation or (saved := asked.saved[place]) is _DONE:
            del asked  # nothing holds what is done with while other stretches run again
            asked = self._ask(operation, place)
            saved = asked.saved[place]
        tensor, version = saved
        if tensor._version != version:
            raise written_into(tensor)
        if asked.left:
            asked.left = left = asked.left & ~(1 << place)
            if left:
                asked.saved[place] = _DONE
            else:
                self._asked = _NOBODY
                self.saved.pop(operation, None)
        return tensor

    def give_way(self, reason: Callable[[], Exception]) -> None:
        """Everything saved goes, and what could bring it again: whoever asks is told the ``reason``."""

        def refuse(operation: int) -> None:
            raise reason()

        with self._lock:
            self.saved.clear()
            self._asked, self.heed, self.begins, self.bring = _NOBODY, 0, None, refuse

    def _ask(self, operation: int, place: int) -> "_Asked":
        """Another operation than the last one asks, or one that was done with what it asks for."""
        with self._lock:
            if self.begins is None:  # the program runs
                if self.running is not None and operation == self.running[0]:
                    asked = _Asked()
                    asked.operation, asked.saved = self.running
                    return asked
            elif (task := _current_task()) != self._task and task >= 0:
                self._task = task
                self.begins()
            there = self.saved
            while next(reversed(there), operation) > operation:
                there.popitem()  # some of it nobody has asked for, or ever will
            saved = there.get(operation)
            if saved is None or operation < self.heed or saved[place] is _DONE:
                del saved
                saved = self._brought(operation, place)
            self._asked = asked = _Asked()
            asked.operation, asked.saved = operation, saved
            often = self.often
            asked.left = 0 if often is None or operation in often else (1 << len(saved)) - 1
            return asked

    def _brought(self, operation: int, place: int) -> Saved:
        """What ``operation`` has saved, recorded again where it is not there or done with, or something moves."""
        saved = self.saved.get(operation)
        if saved is not None and saved[place] is _DONE:
            del self.saved[operation]
        if self.bring is None:
            raise inside()
        self._asked = _NOBODY
        del saved
        self.bring(operation)
        return self.saved[operation]


class _Asked:
    """The operation that asked last (-1: none), what it has saved, and a bit for each place that it has not asked for
    (0: see `Tape`). One is made for each operation of a backward; a constructor would be one call more."""

    operation = -1
    saved: Saved = []  # noqa: RUF012 - nobody's
    left = 0


_DONE = torch.empty(0, device="cpu"), 0
_NOBODY = _Asked()


def unchanged(handle: tuple[torch.Tensor, int, object]) -> torch.Tensor:
    """A saved tensor that the graph holds itself, for autograd. Raises GradientError where it was written into."""
    return still(handle[0], handle[1])


def still(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """A saved tensor. Raises GradientError where it was written into."""
    if tensor._version != version:
        raise written_into(tensor)
    return tensor


def written_into(tensor: torch.Tensor) -> GradientError:
    """The error that says so of a saved tensor."""
    return GradientError(
        f"Program: a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
        "operation after it had been saved, in the program or after it; clone() it before"
    )


def handle(operation: int, place: int) -> int:
    """What the graph holds in place of a saved tensor. Raises GradientError above a million in one operation."""
    if place >= PLACES:
        raise GradientError(f"Program: operation {operation} saves more than {PLACES} tensors; split it")
    return operation * PLACES + place


def inside() -> GradientError:
    """Backward was asked for while the program still ran."""
    return GradientError(
        "Program: the program calls backward or grad itself, but its saved tensors are dropped while it runs; take "
        "that part out of the program, or write it as a torch.autograd.Function"
    )
