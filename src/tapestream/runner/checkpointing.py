"""`torch.utils.checkpoint` switched off: what it would drop and recompute is for a plan to decide. Or its reentrant
kind done as the other, which asks for no backward of its own; and torch.func's transforms, which refuse to work where
saved tensors are taken note of, called without that.

They are looked up anew at every call, so replacing them where they are looked up reaches every user of them. They are
replaced only while somebody wants it, and for that somebody's thread alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from tapestream.errors import InputError

_AUTOGRAD: Any = torch._C._autograd
_DISABLE = "_saved_tensors_hooks_disable"
_THROUGH = "heard_through_transforms"
_FUNCTORCH: Any = torch._C._functorch
_WRAPPED: Callable[[torch.Tensor], bool] = _FUNCTORCH.is_functorch_wrapped_tensor
_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class _Off(threading.local):
    here = False
    reentrant = False
    transforms = False


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
        self._disable: Any = None

    @contextlib.contextmanager
    def off(self, *, reentrant: bool, transforms: bool) -> Iterator[None]:
        before = self._off.here, self._off.reentrant, self._off.transforms
        self._off.here, self._off.reentrant, self._off.transforms = self._off.here or not reentrant, True, transforms
        try:
            with self.replaced():
                yield
        finally:
            self._off.here, self._off.reentrant, self._off.transforms = before

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._put_in()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    vars(checkpoint).update(self._before)
                    setattr(_AUTOGRAD, _DISABLE, self._disable)

    def _put_in(self) -> None:
        off, known = self._off, vars(checkpoint)
        self._before = {name: known[name] for name in (_GENERATOR, _FUNCTION) if name in known}
        generator = self._before.get(_GENERATOR)

        def checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
            return _nothing() if off.here or generator is None else generator(*args, **kwargs)

        put = {_GENERATOR: checkpointing, _FUNCTION: _Plain(self._before.get(_FUNCTION), off)}
        known.update({name: put[name] for name in self._before})

        disabled = self._disable = getattr(_AUTOGRAD, _DISABLE)

        def disable(message: str, fail_if_non_empty: bool = True) -> None:
            """Hooks of ours that are entered stay so, and hear of what they can tell apart, or nothing, or refuse."""
            top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
            if top is not None and getattr(top[0], _THROUGH, False):
                return
            if top is None or not fail_if_non_empty or not _is_ours(top[0]):
                disabled(message, fail_if_non_empty)
            elif off.transforms or not off.here:
                disabled(message, False)
            else:
                raise InputError(
                    "Program: hooks on saved tensors are disabled inside (by disable_saved_tensors_hooks), which a "
                    "program needs to take note of what is saved; use ts.Chain or ts.Loop, whose stages and steps may "
                    "do that, or make it a torch.autograd.Function that calls torch.autograd.grad in its forward"
                )

        setattr(_AUTOGRAD, _DISABLE, disable)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("tapestream.") or hook is torch.Tensor.detach


def _nothing() -> Iterator[None]:
    yield


_SWITCH = _Switch()


def checkpointing_off(*, transforms: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, it calls its function and does nothing else. ``transforms``: torch.func's work, too."""
    return _SWITCH.off(reentrant=False, transforms=transforms)


def reentrant_checkpointing_off() -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, the reentrant kind is done as the other, and torch.func's transforms work."""
    return _SWITCH.off(reentrant=True, transforms=True)


@contextlib.contextmanager
def heard_through_transforms() -> Iterator[None]:
    """Inside, hooks of ours on saved tensors that are entered stay so in torch.func's transforms, and hear of what is
    saved for the graph around these. What a transform saves for a gradient of its own stays as it is."""
    top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    if top is None or not _is_ours(top[0]):
        yield
        return
    pack, unpack = top

    def packed(tensor: torch.Tensor) -> Any:
        return _apart(tensor) if _WRAPPED(tensor) else pack(tensor)

    def unpacked(saved: Any) -> Any:
        return saved if isinstance(saved, torch.Tensor) and _WRAPPED(saved) else unpack(saved)

    setattr(packed, _THROUGH, True)
    with _SWITCH.replaced(), saved_tensors_hooks(packed, unpacked):
        yield


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a transform without the transform's graph, which a saved result would keep alive for ever; with the
    graphs around that."""
    if not _FUNCTORCH.is_gradtrackingtensor(tensor):
        return tensor
    found: torch.Tensor = _FUNCTORCH._wrap_for_grad(
        _FUNCTORCH.get_unwrapped(tensor), _FUNCTORCH.maybe_get_level(tensor)
    )
    return found
