"""What surrounds an operation of a program: noted while it runs, and the same again in replays."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.record import Ambient

_C: Any = torch._C


def _set_deterministic(on: bool) -> None:
    _C._set_deterministic_algorithms(on, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(warn_only: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=warn_only)


def _refused(wanted: str) -> None:
    # PyTorch has two ways to set it, and some questions raise where both are used.
    raise GradientError(
        f"Program: an operation had the precision {wanted!r} of float32 products (torch.set_float32_matmul_precision, "
        "allow_tf32) and is to run again with another; leave it as it is until after backward"
    )


Choice: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]


def _choices(names: Sequence[str]) -> list[Choice]:
    """Of the switches ``names``, of kernels for attention and of others, those that this PyTorch has."""
    found: list[Choice] = []
    for name in names:
        if hasattr(_C, f"_set_sdp_use_{name}"):
            found.append((getattr(_C, f"_get_{name}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{name}")))
        elif hasattr(_C, f"_set_{name}"):
            found.append((getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")))
    return found


def _precision(backend: str) -> Choice:
    ask = getattr(_C, "_get_fp32_precision_getter", None)
    return (torch.get_float32_matmul_precision if ask is None else functools.partial(ask, backend, "matmul")), _refused


_DENORMAL = float.fromhex("0x1p-1074")  # not computed: that would be flushed, too


def _flushes() -> bool:
    """Whether the processor takes denormal numbers for 0, as `torch.set_flush_denormal` has it."""
    return _DENORMAL * 1.0 == 0.0


_ON_CPU: list[Choice] = [
    (_C._get_deterministic_algorithms, _set_deterministic),
    (_C._get_deterministic_algorithms_warn_only, _set_warn_only),
    *_choices(("flash", "math", "sdp_priority_order", "mkldnn_enabled")),
    _precision("mkldnn"),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes, torch.set_flush_denormal),
]
_KERNELS: list[Choice] = [
    *_ON_CPU,
    *_choices(("mem_efficient", "cudnn", "overrideable", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    _precision("cuda"),
]
"""What chooses kernels: how to ask, and how to set it; first what concerns the CPU."""


class Ambients:
    """Numbers of ambients in ``found``, for devices of ``kinds``."""

    def __init__(self, found: list[Ambient], kinds: Sequence[str]) -> None:
        self._found, self._kinds = found, kinds
        self._questions: list[Callable[[], Any]] = [
            torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_cache_enabled,
            torch.get_default_dtype,
            *(functools.partial(torch.is_autocast_enabled, kind) for kind in kinds),
            *(functools.partial(torch.get_autocast_dtype, kind) for kind in kinds),
            *(get for get, _ in (_ON_CPU if tuple(kinds) == ("cpu",) else _KERNELS)),
        ]  # fmt: skip
        self._numbers: dict[Ambient, int] = {}
        self._last: Any = None
        self._number = 0

    def now(self, epoch: int) -> int:
        """The number of what holds now; ``epoch``: see `Ambient`. Raises InputError in inference mode,
        and where tangents are computed."""
        if forward_ad._current_level >= 0:
            raise InputError(
                "Program: forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp and hessian) is at "
                "work, whose tangents a replay would not have; take that part out of the program"
            )
        modes = others() if _C._len_torch_function_stack() else ()
        seen = [ask() for ask in self._questions], epoch, modes, dispatching() if _C._len_torch_dispatch_stack() else ()
        if seen != self._last:  # comparing is cheaper than a hash
            self._last, self._number = seen, self._number_of(*seen)
        return self._number

    def _number_of(self, answers: list[Any], epoch: int, modes: tuple[Any, ...], dispatching: tuple[Any, ...]) -> int:
        (grad, inference, cache, dtype), kinds = answers[:4], len(self._kinds)
        on, dtypes, kernels = answers[4 : 4 + kinds], answers[4 + kinds : 4 + 2 * kinds], answers[4 + 2 * kinds :]
        if inference:
            raise InputError("Program: inference mode is entered inside the program; use torch.no_grad() instead")
        casts = tuple((kind, to if cast else None) for kind, cast, to in zip(self._kinds, on, dtypes, strict=True))
        chosen = tuple(tuple(one) if isinstance(one, list) else one for one in kernels)
        ambient = Ambient(grad, casts, cache, dtype, epoch, chosen, modes, dispatching)
        number = self._numbers.setdefault(ambient, len(self._found))
        if number == len(self._found):
            self._found.append(ambient)
        return number


def modes_entered() -> list[Any]:
    """The function modes that are entered here, the innermost last."""
    found: list[Any] = _modes()  # type: ignore[no-untyped-call]
    return found


def others() -> tuple[Any, ...]:
    """The function modes that are entered here, without those that only watch a program."""
    return tuple(mode for mode in modes_entered() if not getattr(mode, "only_watches", False))


def dispatching() -> tuple[Any, ...]:
    """The dispatch modes that are entered here, without PyTorch's own and ours, which count or log."""
    found: list[Any] = _dispatch_modes()
    return tuple(m for m in found if type(m).__module__.partition(".")[0] not in ("torch", "tapestream"))


def exchange(new: Sequence[Any]) -> None:
    """Have the function modes ``new`` in place of those that are entered."""
    for _ in range(_C._len_torch_function_stack()):
        _pop_mode()  # type: ignore[no-untyped-call]
    for one in new:
        _push_mode(one)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def surroundings(ambients: Iterable[Ambient]) -> Iterator[Callable[[Ambient], None]]:
    """Gives what sets the surroundings of an operation, one of ``ambients``; afterwards all is as before."""
    kinds = sorted({kind for ambient in ambients for kind, _ in ambient.casts})
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    cache, dtype, grad = torch.is_autocast_cache_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()
    kernels, modes = [get() for get, _ in _KERNELS], modes_entered()
    epoch, pushed = [-1], list[Any]()

    def enter(ambient: Ambient) -> None:
        if ambient.epoch != epoch[0]:
            torch.clear_autocast_cache()
            epoch[0] = ambient.epoch
        torch.set_grad_enabled(ambient.grad)
        for kind, precision in ambient.casts:
            torch.set_autocast_enabled(kind, precision is not None)
            if precision is not None:
                torch.set_autocast_dtype(kind, precision)
        torch.set_autocast_cache_enabled(ambient.cache)
        torch.set_default_dtype(ambient.dtype)
        _choose(ambient.kernels)
        exchange(ambient.modes)
        again(ambient.dispatching)

    def again(wanted: Sequence[Any]) -> None:
        """Enter dispatch modes that an operation ran in. Those of backward alone stay: they may count what it does."""
        while pushed:
            _pop_dispatch_mode()
            pushed.pop()
        for mode in wanted:
            if not any(mode is one for one in _dispatch_modes()):
                _push_dispatch_mode(mode)
                pushed.append(mode)

    try:
        yield enter
    finally:
        again(())
        exchange(modes)
        torch.clear_autocast_cache()
        torch.set_grad_enabled(grad)
        for kind, on, precision in casts:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, precision)
        torch.set_autocast_cache_enabled(cache)
        torch.set_default_dtype(dtype)
        _choose(kernels)


def _choose(kernels: Sequence[Any]) -> None:
    for (get, choose), wanted in zip(_KERNELS, kernels, strict=False):
        wanted = list(wanted) if isinstance(get(), list) else wanted
        if get() != wanted:
            choose(wanted)


def unshown(tensor: torch.Tensor, maker: str | None) -> GradientError:
    """``tensor`` was made inside by the node ``maker``, or (None) shows memory of one that was; no call showed how."""
    if maker is None:
        return GradientError(
            f"Program: a tensor of shape {tuple(tensor.shape)} shows memory of a tensor made inside the program, and "
            "no torch call showed how; clone() it"
        )
    return GradientError(
        f"Program: a tensor of shape {tuple(tensor.shape)} was made inside the program by {maker}, which no torch call "
        "showed (a C++ extension, say); wrap that call in a torch.autograd.Function"
    )
