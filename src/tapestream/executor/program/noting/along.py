"""`Along`, the untraced fast path: if all saved tensors fit, a program runs untraced for as long as it repeats the last
call.

Autograd's saved tensors stay where autograd put them. At the first call that differs, tracing begins, as if the program
began there. The bytes of what came before are known from last time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.rerun import context_of, kept_nbytes
from tapestream.executor.program.calls.templates import ATOMS
from tapestream.executor.program.calls.values import nbytes_of
from tapestream.executor.program.calls.writes import QUESTIONS, gives_back
from tapestream.executor.program.noting.following import UNKNOWN
from tapestream.executor.program.record.course import Closely, Course, Expected, nbytes_within
from tapestream.executor.program.record.tape import unchanged
from tapestream.runner.modes import saving_entered
from tapestream.runner.state import storages

_NO_TENSORS = ATOMS | {float}


class Mark:
    """Lives as long as autograd holds something of what one call has saved without being noted."""

    __slots__ = ("__weakref__",)


class Along:
    """One call on the fast path. At the first call that differs, ``otherwise`` is told the bytes held. ``strayed``: an
    operation, the last one that is counted, has made or saved something else than last time.
    """

    def __init__(self, course: Course, otherwise: Callable[[int], None]) -> None:
        self.course, self.otherwise, self.mark = course, otherwise, Mark()
        self._strayed_at: int | None = None
        self._calls, self._next, self._strayed_nbytes = course.calls, 0, 0
        self._saved = list[torch.Tensor]()  # by a call that is heard, for a moment
        self._hooks = saved_tensors_hooks(_marking(self.mark, self._saved), unchanged)

    @property
    def operations(self) -> int:
        """How many it has made."""
        return self._next if self._strayed_at is None else self._strayed_at

    @property
    def strayed(self) -> bool:
        """See `Along`."""
        return self._strayed_at is not None

    @property
    def held_nbytes(self) -> int:
        """Bytes that plain autograd holds of the program so far, at most."""
        return self.course.held_nbytes[self.operations] + self._strayed_nbytes

    def hearing(self, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The ``__torch_function__`` of a mode. It makes a call that is the next one of last time and is not to be
        looked at closely, or made nothing last time, and has ``otherwise`` hear of all others. All in one place, since
        a call of Python's takes as long as what it asks for."""
        calls, grad_enabled, kind, strided = self._calls, torch.is_grad_enabled, torch.Tensor, torch.strided
        asking = QUESTIONS | self.course.asking

        def hear(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            expected, grad, needs, nbytes, closely = calls[self._next]
            if forward_ad._current_level >= 0:
                return otherwise(function, types, args, kwargs)
            if function is not expected and function != expected:
                if function not in asking:
                    return otherwise(function, types, args, kwargs)
                result = function(*args, **kwargs) if kwargs else function(*args)
                if type(result) not in _NO_TENSORS and function not in QUESTIONS:
                    self._asked(result, args)
                return result
            if closely is not None or grad_enabled() is not grad:
                return otherwise(function, types, args, kwargs)
            if needs >= 0:
                for one in args:
                    if type(one) is kind:
                        needs -= one.requires_grad
                    elif type(one) not in _NO_TENSORS:
                        needs -= _needing(one)
                if needs != (sum(map(_needing, kwargs.values())) if kwargs else 0):
                    return otherwise(function, types, args, kwargs)
            result = function(*args, **kwargs) if kwargs else function(*args)
            self._next += 1
            if nbytes >= 0:
                alike = type(result) is kind and result.is_cpu and result.layout is strided and result.nbytes == nbytes
                if not alike and nbytes_within(result) != nbytes:
                    self._strays(result, args)
            return result

        return hear

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that `hearing` has not made, if it is the next one of last time, or gives back what it is given.
        `UNKNOWN` if it is neither."""
        one = self._calls[self._next]
        if function != one.function:
            return function(*args, **(kwargs or {})) if gives_back(function, args, kwargs) else UNKNOWN
        if one.closely is None or torch.is_grad_enabled() is not one.grad:
            return UNKNOWN
        if one.needs >= 0 and one.needs != _needing(args) + sum(map(_needing, (kwargs or {}).values())):
            return UNKNOWN
        return self._looked_at(one, one.closely, function, args, kwargs)

    def _looked_at(self, expected: Expected, closely: Closely, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call if it is given the like of last time. Users' code is to save the like, with nothing kept beside
        it."""
        if not closely.holds(args, kwargs):
            return UNKNOWN
        saved: list[torch.Tensor] | None = None
        if closely.marked and not saving_entered():
            result, saved = self._heard(function, args, kwargs)
        else:
            result = function(*args, **kwargs) if kwargs else function(*args)
        self._next += 1
        results = [result] if type(result) is torch.Tensor else tensors_of(result, [])
        odd: Sequence[torch.Tensor] = ()
        if closely.saves is not None and not saving_entered():
            context = context_of(results)
            if saved is None:
                saved = [] if context is None else [tensor for tensor in context.saved_tensors if tensor is not None]
            kept = kept_nbytes(context, results, args)
            if kept or not closely.is_like(saved):
                odd, self._strayed_nbytes = saved, self._strayed_nbytes + kept
                self._strays((result, odd), args)
        if not self.strayed and 0 <= expected.nbytes != sum(map(nbytes_of, results)):
            self._strays(result, args)
        return result

    def _heard(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        """What a call gives, and what it saves."""
        saved = self._saved
        try:
            with self._hooks:
                result = function(*args, **kwargs) if kwargs else function(*args)
            return result, saved[:]
        finally:
            saved.clear()

    def _asked(self, result: Any, args: Any) -> None:
        if any(all(tensor is not one for one in args) for tensor in tensors_of(result, [])):
            self._strays(result, args)

    def _strays(self, made: Any, args: Any) -> None:
        """A call has made or saved something else than last time, beside what it was given: no call is the next one
        any more."""
        given, own = storages(tensors_of(args, [])), storages(tensors_of(made, []))
        nbytes = sum(nbytes for address, nbytes in own.items() if address not in given)
        held, k = self.course.held_nbytes, self.operations
        self._strayed_nbytes += max(0, nbytes - max(0, held[k] - held[k - 1] if k else 0))
        self._next, self._strayed_at = len(self._calls) - 1, k


def _needing(given: Any) -> int:
    """How many tensors among what a call is given need a gradient."""
    if isinstance(given, torch.Tensor):
        return int(given.requires_grad)
    return sum(map(_needing, given)) if type(given) is list or type(given) is tuple else 0


def _marking(mark: Mark, saved: list[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """``saved``: what there is for a moment."""

    def pack(tensor: torch.Tensor) -> Any:
        saved.append(tensor)
        return tensor.detach(), tensor._version, mark

    return pack
