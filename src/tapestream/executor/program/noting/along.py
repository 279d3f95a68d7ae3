"""`Along`, the untraced fast path: if all saved tensors fit, a program runs untraced for as long as it repeats the last
call.

Autograd's saved tensors stay where autograd put them. At the first call that differs, tracing begins, as if the program
began there. The bytes of what came before are known from last time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.rerun import kept_nbytes
from tapestream.executor.program.calls.values import nbytes_of
from tapestream.executor.program.calls.writes import QUESTIONS, gives_back
from tapestream.executor.program.noting.following import UNKNOWN
from tapestream.executor.program.record.course import Course, nbytes_within
from tapestream.executor.program.record.tape import unchanged
from tapestream.runner.modes import saving_entered
from tapestream.runner.state import storages


class Mark:
    """Lives as long as autograd holds something of what one call has saved without being noted."""

    __slots__ = ("__weakref__",)


class Along:
    """One call on the fast path, which has made so many ``operations``. At the first call that differs, ``otherwise``
    is told the bytes held. ``strayed``: the last operation has made or saved something else than last time.
    """

    def __init__(self, course: Course, otherwise: Callable[[int], None]) -> None:
        self.course, self.otherwise, self.mark = course, otherwise, Mark()
        self.operations = self._strayed_nbytes = 0
        self._next = 0  # among those of last time
        self._functions, self._nbytes = course.functions, course.nbytes
        self._grads, self._needs = course.grads, course.needs
        self._closely, self._marked = course.closely, course.marked
        self._saved, self._odd = list[torch.Tensor](), list[torch.Tensor]()  # now, and where that was odd
        self.strayed = False
        self._hooks = saved_tensors_hooks(_marking(self.mark, self._saved), unchanged)

    @property
    def held_nbytes(self) -> int:
        """Bytes that plain autograd holds of the program so far, at most."""
        return self.course.held_nbytes[self.operations] + self._strayed_nbytes

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call if it is the next one of last time, or makes nothing. `UNKNOWN` if it is neither."""
        k = self._next
        expected = self._functions[k]
        if function is not expected and function != expected:
            return self._asked(function, args, kwargs)
        if torch.is_grad_enabled() is not self._grads[k] or self._needs[k] not in (-1, _needing(args, kwargs)):
            return UNKNOWN
        if k in self._closely and not self._closely[k].holds(args, kwargs):
            return UNKNOWN
        if k in self._marked and not saving_entered():
            result = self._heard(k, function, args, kwargs)
        else:
            result = function(*args, **kwargs) if kwargs else function(*args)
        self.operations = self._next = k + 1
        nbytes = self._nbytes[k]
        if self._odd or (
            nbytes >= 0 and nbytes != (nbytes_of(result) if type(result) is torch.Tensor else nbytes_within(result))
        ):
            self._strays((result, self._odd), args)
        return result

    def _heard(self, k: int, function: Any, args: Any, kwargs: Any) -> Any:
        """Make a call, and hear what it saves: of users' code, by the kind of hooks that heard it last time, it is to
        be the like, with nothing kept beside it."""
        saved, closely = self._saved, self._closely.get(k)
        try:
            with self._hooks:
                result = function(*args, **kwargs) if kwargs else function(*args)
            if closely is not None and closely.saves is not None:
                kept = kept_nbytes([result] if type(result) is torch.Tensor else tensors_of(result, []), args)
                if kept or not closely.is_like(saved):
                    self._strayed_nbytes += kept
                    self._odd = list(saved)
            return result
        finally:
            saved.clear()

    def _asked(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function in QUESTIONS or gives_back(function, args, kwargs):
            return function(*args, **(kwargs or {}))
        if function not in self.course.asking:
            return UNKNOWN
        result = function(*args, **(kwargs or {}))
        if any(all(tensor is not one for one in args) for tensor in tensors_of(result, [])):
            self._strays(result, args)
        return result

    def _strays(self, made: Any, args: Any) -> None:
        """A call has made or saved something else than last time, beside what it was given: no call is the next one
        any more."""
        given, own = storages(tensors_of(args, [])), storages(tensors_of(made, []))
        nbytes = sum(nbytes for address, nbytes in own.items() if address not in given)
        held, k = self.course.held_nbytes, self.operations
        self._strayed_nbytes += max(0, nbytes - max(0, held[k] - held[k - 1] if k else 0))
        self._odd, self._next, self.strayed = [], len(self._functions) - 1, True


def _needing(args: Any, kwargs: Any) -> int:
    """How many of the tensors that a call is given need a gradient."""
    found = 0
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            found += one.requires_grad
        elif type(one) is list or type(one) is tuple:
            found += _needing(one, None)
    return found


def _marking(mark: Mark, saved: list[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """``saved``: what there is for a moment."""

    def pack(tensor: torch.Tensor) -> Any:
        saved.append(tensor)
        return tensor.detach(), tensor._version, mark

    return pack
