"""torch's random generators while a program runs: which operations draw, and whether anything unseen has."""

from dataclasses import replace

import torch

from tapestream.errors import GradientError
from tapestream.executor.program.calls.patterns import Call
from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.calls.whole import Whole
from tapestream.executor.program.record.record import Record
from tapestream.runner.ambient import TorchGenerators

_SETTING = frozenset(("manual_seed", "manual_seed_all", "set_rng_state"))
_BY_DATA = frozenset(
    ("rrelu", "rrelu_", "rrelu_with_noise", "poisson", "binomial", "multinomial", "_standard_gamma",
     "_sample_dirichlet")
)  # fmt: skip
"""Functions that draw as often as what their tensors hold says, maybe never: they are looked at in every call."""


class Draws:
    """Which operations of a program draw random numbers. Where something else changes what they draw (another thread,
    an extension, a generator set by its own method), nothing may be run again.

    A call is looked at until one like it, with the same constants and shapes, has drawn nothing; what users have
    written, always.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._state, self._seed = record, TorchGenerators.capture(), torch.initial_seed()
        self._nbytes: dict[int, int] = {}  # of the states of generators that are drawn from

    def before(self, call: Call) -> TorchGenerators | None:
        """The states before a call; None where it does not draw."""
        if call.quiet:
            return None
        for one in call.pattern.generators:
            if id(one) not in self._record.own:
                self._record.own[id(one)] = one, one.get_state()
                self._state = replace(self._state, own=(*self._state.own, self._record.own[id(one)]))
        return self._record.generators()

    def after(self, before: TorchGenerators, call: Call) -> bool:
        """Whether the call has drawn, or has set a generator."""
        function = call.pattern.function
        name = getattr(function, "__name__", "")
        now, sets = self._record.generators(), name in _SETTING
        if sets:
            self._seed = torch.initial_seed()
        elif isinstance(function, Whole) and torch.initial_seed() != self._seed:
            raise GradientError(
                "Program: torch's random generator was set inside a leaf module; set it outside, or leave its class "
                "out of opaque"
            )
        if now.equals(before):
            if not (sets or name in _BY_DATA or by_user(function)):
                self._record.patterns.draws_nothing(call)
            return False
        if not (sets or before.equals(self._state)) or len(now.others) != len(before.others):
            self._record.spoilt = self._record.spoilt or (
                "torch's random generator was set or drawn from inside the program in a way that cannot be traced (a "
                "generator's own set_state, another thread, an extension, or the first use of CUDA; "
                "torch.manual_seed() and torch.set_rng_state() can be traced)"
            )
        pairs = enumerate(zip(now.states(), before.states(), strict=False))
        self._nbytes |= {k: state.nbytes for k, (state, was) in pairs if not torch.equal(state, was)}
        self._state, self._record.draws_nbytes = now, sum(self._nbytes.values())
        return True
