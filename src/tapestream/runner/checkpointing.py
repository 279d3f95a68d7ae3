"""`torch.utils.checkpoint` switched off: what it would drop and recompute is for a plan to decide. Or its reentrant
kind done as the other, which asks for no backward of its own.

It is looked up anew at every call, so replacing it where it is looked up reaches every user of it. It is replaced only
while somebody wants it off, and for that somebody's thread alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class _Off(threading.local):
    here = False
    reentrant = False


class _Plain:
    """Stands for ``CheckpointFunction``, the reentrant kind."""

    def __init__(self, before: Any, off: _Off) -> None:
        self._before, self._off = before, off

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call the function, under checkpointing in other threads."""
        if self._off.here:
            return function(*args)
        if not self._off.reentrant:
            return self._before.apply(function, preserve, *args)
        if not any(isinstance(one, torch.Tensor) and one.requires_grad for one in args):
            with torch.no_grad():  # as the reentrant kind does
                return function(*args)
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


class _Switch:
    def __init__(self) -> None:
        self._off, self._lock, self._users = _Off(), threading.Lock(), 0
        self._before: dict[str, Any] = {}

    @contextlib.contextmanager
    def off(self, *, reentrant: bool) -> Iterator[None]:
        before = self._off.here, self._off.reentrant
        self._off.here, self._off.reentrant = self._off.here or not reentrant, True
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._put_in()
        try:
            yield
        finally:
            self._off.here, self._off.reentrant = before
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
    return _SWITCH.off(reentrant=False)


def reentrant_checkpointing_off() -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, the reentrant kind is done as the other."""
    return _SWITCH.off(reentrant=True)
