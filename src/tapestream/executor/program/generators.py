"""torch's random generators while a program runs: their states, and whether anything unseen has changed them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.program.record import Record
from tapestream.executor.program.seams import Apply
from tapestream.executor.program.whole import Whole
from tapestream.runner.ambient import HostGenerators

_SETTING = frozenset(("manual_seed", "manual_seed_all", "set_rng_state"))


def cuda_in_use() -> bool:
    """Whether this process uses CUDA by now."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Generators:
    """States of torch's default generators: the CPU's and, once CUDA is in use, that of every CUDA device."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def capture(cls) -> "Generators":
        """The states as they are now."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if cuda_in_use() else ()
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)

    def equals(self, other: "Generators") -> bool:
        """Nothing was drawn in between."""
        return self._bytes() == other._bytes()

    def _bytes(self) -> list[bytes]:
        try:
            return [state.numpy().tobytes() for state in (self.cpu, *self.cuda)]
        except RuntimeError:
            raise InputError(
                "Program: random generators cannot be looked at inside torch.func.vmap, jvp and the like; "
                "wrap that call in a torch.autograd.Function, or write it without the transform"
            ) from None

    @property
    def nbytes(self) -> int:
        """Of all states."""
        return self.cpu.nbytes + sum(state.nbytes for state in self.cuda)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Whatever is drawn inside, the generators (Python's and NumPy's too) are afterwards as before."""
    before, host = Generators.capture(), HostGenerators.capture()
    try:
        yield
    finally:
        before.restore()
        host.restore()


class Draws:
    """Which operations of a program draw random numbers. Where something else changes what they draw (another thread,
    an extension, a generator set by its own method), nothing may be run again.

    A call is looked at when its pattern is new, or has drawn before; what users have written, always.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._state, self._seed = record, Generators.capture(), torch.initial_seed()
        self._quiet = set[int]()  # ids of patterns of the record, and of functions that give no tensors
        self._held: list[Any] = []

    def before(self, pattern: Any, function: Any) -> Generators | None:
        """The states before a call; None where it does not draw."""
        return None if id(pattern) in self._quiet or id(function) in self._quiet else Generators.capture()

    def after(self, before: Generators | None, function: Callable[..., Any], like: Any) -> bool:
        """Whether the call has drawn, or has set a generator. ``like``: what tells calls that will not either."""
        if before is None:
            return False
        now, sets = Generators.capture(), getattr(function, "__name__", "") in _SETTING
        if sets:
            self._seed = torch.initial_seed()
        elif isinstance(function, Whole) and torch.initial_seed() != self._seed:
            raise GradientError(
                "Program: torch's random generator was set inside a module taken as one operation; set it outside, "
                "or leave its class out of opaque"
            )
        if now.equals(before):
            if like is not None and not sets and not isinstance(function, (Apply, Whole)):
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
