"""What surrounds an operation of a program: noted while it runs, and the same again in replays."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.record.record import Ambient
from tapestream.runner.kernels import FOR_ATTENTION, FOR_PRODUCTS, GUARDED, KERNELS, ON_CPU, are_chosen, choose, fixed
from tapestream.runner.modes import Dispatching, dispatching, exchange, modes_entered, others

_C: Any = torch._C
_functions, _dispatches = _C._len_torch_function_stack, _C._len_torch_dispatch_stack


_GUARD: Any = getattr(getattr(getattr(_C, "_dynamo", None), "guards", None), "GlobalStateGuard", None)
"""Tells by one call whether the grad mode, autocast, the default dtype, `GUARDED` and some more are what they were when
it was made. (What is asked between two kernels is no longer in the processor's caches: the less, the faster.)"""


class Ambients:
    """Numbers of ambients in ``found``, for devices of ``kinds``; ``number``: that of what held when asked last."""

    def __init__(self, found: list[Ambient], kinds: Sequence[str]) -> None:
        self._found, self._kinds = found, kinds
        kernels = [get for get, _ in (ON_CPU if tuple(kinds) == ("cpu",) else KERNELS)]
        self._questions: list[Callable[[], Any]] = [
            torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_cache_enabled,
            torch.get_default_dtype,
            *(functools.partial(torch.is_autocast_enabled, kind) for kind in kinds),
            *(functools.partial(torch.get_autocast_dtype, kind) for kind in kinds),
            *kernels,
        ]  # fmt: skip
        self._numbers: dict[Ambient, int] = {}
        self._last: Any = None
        self.number = 0
        elsewhere = (*GUARDED, *FOR_ATTENTION, *FOR_PRODUCTS)
        self._always = [torch.is_inference_mode_enabled, *(get for get in kernels if get not in elsewhere)]
        self._products = [get for get in kernels if get in FOR_PRODUCTS]
        self._guard: Any = None
        self._guarded: tuple[int, list[Any], list[Any]] = 0, [], []

    def now(self, epoch: int) -> int:
        """The number of what holds now; ``epoch``: see `Ambient`. Raises InputError in inference mode."""
        modes = others() if _functions() else ()
        answers = [*map(operator.call, self._questions)]
        seen = answers, epoch, modes, dispatching() if _dispatches() else ()
        if seen != self._last:  # comparing is cheaper than a hash
            self._last, self.number = seen, self._number_of(*seen)
        return self.number

    def guard(self, epoch: int) -> None:
        """From now on, `hold` tells whether what `now` was just asked for holds."""
        if _GUARD is not None and not (_functions() or _dispatches()):
            answers = [*map(operator.call, self._always)], [*map(operator.call, self._products)]
            self._guard, self._guarded = _GUARD(), (epoch, *answers)

    def hold(self, epoch: int, products: bool) -> bool:
        """Whether they do for sure, but for what attention alone goes by, and products (unless ``products``)."""
        guard = self._guard
        if guard is None or not guard.check():
            return False
        if _functions() or _dispatches():
            return False
        at, always, precisions = self._guarded
        if epoch != at or [*map(operator.call, self._always)] != always:
            return False
        return not products or [*map(operator.call, self._products)] == precisions

    def _number_of(self, answers: list[Any], epoch: int, modes: tuple[Any, ...], dispatching: tuple[Any, ...]) -> int:
        (grad, inference, cache, dtype), kinds = answers[:4], len(self._kinds)
        on, dtypes, kernels = answers[4 : 4 + kinds], answers[4 + kinds : 4 + 2 * kinds], answers[4 + 2 * kinds :]
        if inference:
            raise InputError("Program: inference mode is entered inside the program; use torch.no_grad() instead")
        casts = tuple((kind, to if cast else None) for kind, cast, to in zip(self._kinds, on, dtypes, strict=True))
        chosen = tuple(map(fixed, kernels))
        ambient = Ambient(grad, casts, cache, dtype, epoch, chosen, modes, dispatching)
        number = self._numbers.setdefault(ambient, len(self._found))
        if number == len(self._found):
            self._found.append(ambient)
        return number


@contextlib.contextmanager
def surroundings(ambients: Iterable[Ambient]) -> Iterator[Callable[[Ambient], None]]:
    """Gives what sets the surroundings of an operation, one of ``ambients``; afterwards all is as before."""
    ambients = [*ambients]
    if len(ambients) == 1 and _is_here(ambients[0]):
        with torch.set_grad_enabled(ambients[0].grad):
            yield _nothing
        return
    kinds = sorted({kind for ambient in ambients for kind, _ in ambient.casts})
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    cache, dtype, grad = torch.is_autocast_cache_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()
    kernels, modes = [get() for get, _ in KERNELS], modes_entered()
    epoch, again = [-1], Dispatching()

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
        choose(ambient.kernels)
        exchange(ambient.modes)
        again.enter(ambient.dispatching)

    try:
        yield enter
    finally:
        again.leave()
        exchange(modes)
        torch.clear_autocast_cache()
        torch.set_grad_enabled(grad)
        for kind, on, precision in casts:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, precision)
        torch.set_autocast_cache_enabled(cache)
        torch.set_default_dtype(dtype)
        choose(kernels)


def _is_here(ambient: Ambient) -> bool:
    """Whether all but the grad mode is as it is now, and nothing is cast, so that no cast is remembered either."""
    if any(precision is not None or torch.is_autocast_enabled(kind) for kind, precision in ambient.casts):
        return False
    if (torch.is_autocast_cache_enabled(), torch.get_default_dtype()) != (ambient.cache, ambient.dtype):
        return False
    if not are_chosen(ambient.kernels) or tuple(modes_entered()) != ambient.modes:
        return False
    return dispatching() == ambient.dispatching


def _nothing(ambient: Ambient) -> None:
    """All is as it should be."""


def unshown(tensor: torch.Tensor, maker: str | None) -> GradientError:
    """``tensor`` was made inside by the node ``maker``, or (None) shows memory of one that was; no call showed how."""
    if maker is None:
        return GradientError(
            f"Program: a tensor of shape {tuple(tensor.shape)} came to share memory with one made inside the program, "
            "without a torch call; clone() it"
        )
    return GradientError(
        f"Program: a tensor of shape {tuple(tensor.shape)} was made inside the program by {maker}, without a torch "
        "call (by a C++ extension, say); wrap that in a torch.autograd.Function"
    )
