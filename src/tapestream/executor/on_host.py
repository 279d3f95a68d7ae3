"""`UpdatesOnHost`: updates of blocks in RAM, one after the other, while the device goes on."""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import RLock

import torch

from tapestream.errors import GradientError, InputError, TapestreamError
from tapestream.executor.engines.threads import Worker
from tapestream.executor.updating import Hidden


class UpdatesOnHost:
    """``under_way``: by block, updates that were begun and nobody has waited for."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._process = os.getpid()
        self.under_way: dict[int, list[Future[None]]] = {}
        self._hidden: dict[int, Hidden] = {}  # tensors of users
        self._lock = RLock()  # users may look from several threads

    def uses(self, block: int) -> bool:
        """Whether an update of the block is under way."""
        return block in self.under_way

    def begin(self, block: int, update: Callable[[], None]) -> None:
        """Let the thread call ``update`` after those that were begun before."""
        if self._worker is None:
            self._worker, self._process = Worker("tapestream updates"), os.getpid()
            weakref.finalize(self, self._worker.close)  # at the program's end, too: not in the middle of an update
        self.under_way.setdefault(block, []).append(self._worker.submit(update))

    def hide(self, block: int, tensors: list[torch.Tensor]) -> None:
        """Whoever looks at these waits for the updates of the block."""
        self._hidden[block] = hidden = Hidden(tensors, partial(self.end, block))
        hidden.hide()

    def end(self, block: int) -> None:
        """Wait for the updates of a block. Raises GradientError where one has failed, once."""
        futures = self.under_way.get(block)
        if futures is None:
            return
        if os.getpid() != self._process:
            raise InputError(
                "a forked child process asked for weights, gradients or state that its parent was updating when it was "
                "forked; in the parent, read them (or call optimizer.state_dict()) before the child starts"
            )
        errors = [error for error in map(Future.exception, futures) if error is not None]
        with self._lock:
            if self.under_way.pop(block, None) is None:  # another thread has waited, too
                return
            hidden = self._hidden.pop(block, None)  # not before: interrupted, it is still under way
            if hidden is not None:
                hidden.show()
        if errors:
            raise _named(block, errors[0])

    def finish(self) -> None:
        """Wait for all of them; raises what the first has raised."""
        failed: Exception | None = None
        for block in tuple(self.under_way):
            try:
                self.end(block)
            except TapestreamError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the thread when it has done what was begun."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _named(block: int, error: BaseException) -> TapestreamError:
    if isinstance(error, TapestreamError):
        return error
    found = GradientError(f"the update of block {block} in RAM failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
