"""Function modes and dispatch modes that are entered, of users and of others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from tapestream.accelerator.device import is_accelerator
from tapestream.runner.graph import numbered_here
from tapestream.runner.kernels import KERNELS, ON_CPU, algorithms_not_tried, choose
from tapestream.runner.nesting import cover, uncover

_C: Any = torch._C


def modes_entered() -> list[Any]:
    """The function modes that are entered here, the innermost last."""
    found: list[Any] = _modes()  # type: ignore[no-untyped-call]
    return found


def others() -> tuple[Any, ...]:
    """The function modes that are entered here, without those that only watch a program."""
    return tuple(mode for mode in modes_entered() if not getattr(mode, "only_watches", False))


take_off: Callable[[], Any] = _C._pop_torch_function_stack
"""Leave the function mode that was entered last, and give it."""
put_on: Callable[[Any], None] = _C._push_on_torch_function_stack
"""Enter a function mode that was taken off."""


def only_places_tensors() -> bool:
    """Whether no mode and no hooks on saved tensors are entered here but the mode that says where new tensors lie
    (`torch.set_default_device`), which another thread may enter, too."""
    others = any(type(mode) is not DeviceContext for mode in modes_entered()) or _C._len_torch_dispatch_stack()
    return not (others or torch.is_inference_mode_enabled() or saving_entered() or _why_none() is not None)


def exchange(new: Sequence[Any]) -> None:
    """Have the function modes ``new`` in place of those that are entered."""
    for _ in range(_C._len_torch_function_stack()):
        take_off()
    for one in new:
        put_on(one)


def saving_entered() -> bool:
    """Whether any hooks on saved tensors are entered here."""
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


def _why_none() -> str | None:
    """What was said when hooks on saved tensors were disabled; None where they are not."""
    found: str | None = _C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return found


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Inside, hooks on saved tensors may be entered, wherever somebody around a backward has disabled them."""
    message = _why_none()
    if message is None:
        yield
        return
    _C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _C._autograd._saved_tensors_hooks_disable(message, False)


@contextlib.contextmanager
def unhooked(ours: Callable[[Any], bool] | None = None) -> Iterator[None]:
    """Inside, hooks on saved tensors that are entered here are left: all, or the innermost that are ``ours``."""
    autograd, taken = _C._autograd, list[tuple[Any, Any]]()
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None and (ours is None or ours(top[0])):
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def save_below(hooks: saved_tensors_hooks) -> None:
    """Enter ``hooks`` below all that are entered here, which are left before them."""
    with unhooked():
        hooks.__enter__()


def dispatching() -> tuple[Any, ...]:
    """The dispatch modes that are entered here, without PyTorch's own and ours, which count or log."""
    return tuple(mode for mode in _dispatch_modes() if _is_users(mode))


class Dispatching:
    """Replays run in the user's dispatch modes of the first run, and not in those of backward."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def enter(self, wanted: Sequence[Any]) -> None:
        """Have ``wanted`` for the user's."""
        found: list[Any] = _dispatch_modes()
        if [id(mode) for mode in found if _is_users(mode)] == [id(mode) for mode in wanted]:
            return
        if self._before is None:
            self._before = found
        self._exchange(found, [*(mode for mode in found if not _is_users(mode)), *wanted])

    def leave(self) -> None:
        """As before the first `enter`."""
        if self._before is not None:
            self._exchange(_dispatch_modes(), self._before)
            self._before = None

    @staticmethod
    def _exchange(old: Sequence[Any], new: Sequence[Any]) -> None:
        for _ in old:
            _pop_dispatch_mode()
        for mode in new:
            _push_dispatch_mode(mode)


def _is_users(mode: Any) -> bool:
    known = type(mode).__module__.partition(".")[0] in ("torch", "tapestream")
    return not (known or getattr(mode, "only_watches", False))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def with_tangents() -> contextlib.AbstractContextManager[None]:
    """Inside, forward-mode differentiation works, which autograd switches off while a function of its own runs."""
    return forward_ad._set_fwd_grad_enabled(True)


class as_a_stage:
    """What every run of a stage has around it, the first and the recompute: gradients are on, front ends inside are
    covered, hooks on saved tensors around the call are left (a checkpoint's would ask for what is not its own), nodes
    of its graph are numbered by this thread, and no algorithms are tried.

    A class: what contextlib makes of a function takes as long as a small operation.
    """

    __slots__ = ("_covering", "_device", "_grad", "_others")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._covering, self._grad, self._others = cover(), torch.is_grad_enabled(), None
        torch._C._set_grad_enabled(True)
        if saving_entered() or is_accelerator(self._device):
            self._others = _further(self._device)
            self._others.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        try:
            return None if self._others is None else self._others.__exit__(*raised)
        finally:
            torch._C._set_grad_enabled(self._grad)
            uncover(self._covering)


@contextlib.contextmanager
def _further(device: torch.device) -> Iterator[None]:
    with unhooked():
        if is_accelerator(device):
            with numbered_here(device), algorithms_not_tried(device):
                yield
        else:
            yield


class Surroundings:
    """What a call is made in, beside autocast and generators: the default dtype, what chooses kernels, and the user's
    modes. ``on_cpu``: what chooses kernels there alone matters."""

    __slots__ = ("_dispatching", "_dtype", "_kernels", "_modes")

    def __init__(self, *, on_cpu: bool) -> None:
        self._dtype, self._modes, self._dispatching = torch.get_default_dtype(), others(), dispatching()
        self._kernels = [get() for get, _ in (ON_CPU if on_cpu else KERNELS)]

    def hold(self) -> bool:
        """Whether they are the same here, and nothing else stands in the way of running something again."""
        if _C._len_torch_function_stack() or self._modes or self._dispatching or _C._len_torch_dispatch_stack():
            return False
        if torch.is_inference_mode_enabled() or saving_entered() or _why_none() is not None:
            return False
        kernels = [get() for get, _ in KERNELS[: len(self._kernels)]]
        return torch.get_default_dtype() == self._dtype and kernels == self._kernels

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same inside, in no inference mode, and without the hooks on saved tensors of somebody around it."""
        if self.hold():
            yield
            return
        dtype, modes, dispatched = torch.get_default_dtype(), modes_entered(), Dispatching()
        kernels = [get() for get, _ in KERNELS[: len(self._kernels)]]
        plainly = saved_tensors_hooks(torch.Tensor.detach, _same) if saving_entered() else contextlib.nullcontext()
        try:
            torch.set_default_dtype(self._dtype)
            choose(self._kernels)
            exchange([*(mode for mode in modes if getattr(mode, "only_watches", False)), *self._modes])
            dispatched.enter(self._dispatching)
            with torch.inference_mode(False), hooks_allowed(), plainly:
                yield
        finally:
            dispatched.leave()
            exchange(modes)
            torch.set_default_dtype(dtype)
            choose(kernels)
