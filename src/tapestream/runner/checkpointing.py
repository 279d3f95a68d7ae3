"""`torch.utils.checkpoint` switched off: what it would drop and recompute is for a plan to decide.

It is looked up anew at every call, so replacing it where it is looked up reaches every user of it. It is replaced only
while somebody wants it off, and for that somebody's thread alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class _Off(threading.local):
    here = False


class _Plain:
    """Stands for ``CheckpointFunction``, the reentrant kind."""

    def __init__(self, before: Any, off: _Off) -> None:
        self._before, self._off = before, off

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call the function, under checkpointing in other threads."""
        return function(*args) if self._off.here else self._before.apply(function, preserve, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


class _Switch:
    def __init__(self) -> None:
        self._off, self._lock, self._users = _Off(), threading.Lock(), 0
        self._before: dict[str, Any] = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        before, self._off.here = self._off.here, True
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._put_in()
        try:
            yield
        finally:
            self._off.here = before
            with self._lock:
                self._users -= 1
                if not self._users:
                    vars(checkpoint).update(self._before)

    def _put_in(self) -> None:
        off, known = self._off, vars(checkpoint)
        self._before = {name: known[name] for name in (_GENERATOR, _FUNCTION) if name in known}
        generator = self._before.get(_GENERATOR)

        def checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
            return _nothing() if off.here or generator is None else generator(*args, **kwargs)

        put = {_GENERATOR: checkpointing, _FUNCTION: _Plain(self._before.get(_FUNCTION), off)}
        known.update({name: put[name] for name in self._before})


def _nothing() -> Iterator[None]:
    yield


_SWITCH = _Switch()


def checkpointing_off() -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, it calls its function and does nothing else."""
    return _SWITCH.off()
