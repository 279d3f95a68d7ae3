"""`ForwardThread`: the user's forward of one micro-batch, which stands still at every block until all have come there.

One thread runs at a time: the caller's, or that of the micro-batch which the caller waits for.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.streams import current_stream, on_stream
from tapestream.runner.ambient import Autocast
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.modes import exchange, modes_entered

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A thread has come to a block, which is to be called like this."""

    position: int
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """What ran in the thread has returned this."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _GoOn:
    """With what the block has returned."""

    value: Any


class _Stopped(BaseException):
    """Raised in a thread that nobody will let go on."""


class ForwardThread:
    """``work`` in a thread of its own, with the autocast, the context variables and the stream of the one that makes
    this."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._entered = _like_here(device)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="tapestream forward", daemon=True)
        self._asked.put(work)

    def start(self) -> BlockRequest | Ended:
        """Run until the first block, or the end. Raises what ``work`` raises."""
        self._thread.start()
        return self._answer()

    def go_on(self, value: Any) -> BlockRequest | Ended:
        """The same from the block at which it stands, which has returned ``value``."""
        self._asked.put(_GoOn(value))
        return self._answer()

    def within(self, function: Callable[[], T]) -> T:
        """Call ``function`` there, while it stands at a block."""
        self._asked.put(function)
        found = self._answer()
        assert isinstance(found, Ended)
        value: T = found.value
        return value

    def stop(self) -> None:
        """Leave what it stands in, as by an exception, and wait for its end."""
        if self._thread.ident is not None:
            self._asked.put(None)
            self._thread.join()

    def wait_at(self, request: BlockRequest) -> Any:
        """In the thread: stand at a block; returns what that has returned."""
        self._answers.put(request)
        del request
        while True:
            asked = self._asked.get()
            if isinstance(asked, _GoOn):
                return asked.value
            if asked is None:
                raise _Stopped
            self._do(asked)
            del asked

    def _answer(self) -> BlockRequest | Ended:
        found = self._answers.get()
        if isinstance(found, _Raised):
            raise found.error
        assert isinstance(found, (BlockRequest, Ended))
        return found

    def _run(self) -> None:
        work = self._asked.get()
        with contextlib.suppress(_Stopped), self._entered():
            self._do(work)

    def _do(self, function: Callable[[], Any]) -> None:
        try:
            found: Any = Ended(function())
        except _Stopped:
            raise
        except BaseException as error:
            found = _Raised(error)
        del function
        self._answers.put(found)


def _like_here(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What another thread is to enter so that PyTorch is there as it is in this one."""
    autocast, cache = Autocast.capture(device), torch.is_autocast_cache_enabled()
    stream, modes = current_stream(device) if is_accelerator(device) else None, modes_entered()

    @contextlib.contextmanager
    def entered() -> Any:
        torch.get_num_threads()  # the thread's first question has it compute with as many as the others
        exchange(modes)
        with contextlib.ExitStack() as stack:
            stack.enter_context(checkpointing_off())
            if stream is not None:
                stack.enter_context(on_stream(stream))
            if autocast.enabled:
                stack.enter_context(autocast.entered(cache=False))
                torch.set_autocast_cache_enabled(cache)
            stack.enter_context(torch.enable_grad())
            yield

    return entered
