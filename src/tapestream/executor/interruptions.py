"""What must not be left half done when Ctrl-C comes."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interruptions_after() -> Iterator[None]:
    """Inside, the first Ctrl-C waits until the block has ended; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(came) == 1:
            before(signal.SIGINT, came[0])
