"""torch's random generators while a program runs: which operations draw, and whether anything unseen has."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.executor.program.record import Record
from tapestream.executor.program.users import by_user
from tapestream.executor.program.whole import Whole
from tapestream.runner.ambient import TorchGenerators

_SETTING = frozenset(("manual_seed", "manual_seed_all", "set_rng_state"))


class Draws:
    """Which operations of a program draw random numbers. Where something else changes what they draw (another thread,
    an extension, a generator set by its own method), nothing may be run again.

    A call is looked at when its pattern is new, or has drawn before; what users have written, always.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._state, self._seed = record, TorchGenerators.capture(), torch.initial_seed()
        self._quiet = set[int]()  # ids of patterns of the record, and of functions that give no tensors
        self._held: list[Any] = []

    def before(self, pattern: Any, function: Any) -> TorchGenerators | None:
        """The states before a call; None where it does not draw."""
        return None if id(pattern) in self._quiet or id(function) in self._quiet else TorchGenerators.capture()

    def after(self, before: TorchGenerators, function: Callable[..., Any], like: Any) -> bool:
        """Whether the call has drawn, or has set a generator. ``like``: what tells calls that will not either."""
        now, sets = TorchGenerators.capture(), getattr(function, "__name__", "") in _SETTING
        if sets:
            self._seed = torch.initial_seed()
        elif isinstance(function, Whole) and torch.initial_seed() != self._seed:
            raise GradientError(
                "Program: torch's random generator was set inside a module taken as one operation; set it outside, "
                "or leave its class out of opaque"
            )
        if now.equals(before):
            if like is not None and not sets and not by_user(function):
                self._quiet.add(id(like))
                self._held.append(like)  # so that its id stays its own
            return False
        if not (sets or before.equals(self._state)) or len(now.cuda) != len(before.cuda):
            self._record.spoilt = self._record.spoilt or (
                "torch's random generator was set or drawn from inside the program in a way that cannot be seen (by a "
                "generator's own set_state, another thread, an extension, or where CUDA is used for the first time; "
                "torch.manual_seed() and torch.set_rng_state() can be seen)"
            )
        self._state, self._record.draws_nbytes = now, now.nbytes
        return True
