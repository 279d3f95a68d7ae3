"""The first call of a plan, measured: what it holds at its peak, against the budget."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import allocator_bytes
from tapestream.planning.cache import KnownInputs
from tapestream.planning.exceeded import Exceeded, limit_of
from tapestream.planning.plan import Plan
from tapestream.runner.runner import Gradients
from tapestream.runner.seen import Seen, generators_nbytes
from tapestream.runner.state import State, storages
from tapestream.storage.meter import MemoryMeter, profiling, watch_memory
from tapestream.units import format_nbytes

_MOST_STAGES = 4096
"""Of a chain that is measured as a whole: the meter notes each tensor that comes and goes."""


@dataclass(slots=True)
class FirstCall:
    """Of a ``plan`` within ``limit_nbytes``. If it holds more, it says so (``strict``: with an error), and what is
    ``known`` of the stages learns it. What is measured is never more than what is held: results, and gradients that
    stay (unless they count, ``within``), are taken off as if all of them were there at the peak."""

    known: KnownInputs
    plan: Plan
    limit_nbytes: int
    device: torch.device
    exceeded: Exceeded
    strict: bool
    within: bool
    held_nbytes: int = field(default=0, init=False)
    most_nbytes: int = field(default=0, init=False)

    @classmethod
    def of(
        cls, known: KnownInputs, plan: Plan, limit_nbytes: int | None, device: torch.device, exceeded: Exceeded,
        *, strict: bool, within: bool,
    ) -> "FirstCall | None":  # fmt: skip
        """None where it is not measured: nothing is allowed, something moves (into memory that stays), or there are too
        many stages. ``within``: gradients count."""
        if limit_nbytes is None or plan.simulation.bytes_moved or len(plan.profile) > _MOST_STAGES:
            return None
        return cls(known, plan, limit_nbytes, device, exceeded, strict, within)

    def forward(self, run: Callable[[], State], seen: Mapping[int, Seen]) -> State:
        """What ``run`` gives, the last state; ``seen``: of its stages; states of generators do not count."""
        with self._measured() as meter:
            out = run()
        if meter is not None:
            made = sum(storages(out.tensors).values()) + generators_nbytes(seen.values())
            self.held_nbytes = meter.end_nbytes - made
            self.most_nbytes = max(self.held_nbytes, meter.peak_nbytes - made)
        return out

    def backward(
        self, run: Callable[[], Gradients], sums: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> Gradients:
        """What ``run`` gives, the gradients of the first state; it leaves those of leaves in ``sums``, by id. Raises
        BudgetError if ``strict``."""
        if not self.most_nbytes:
            return run()
        with self._measured() as meter:
            given = run()
        if meter is not None:
            stay = [g for g in given if g is not None] + [g for _, g in sums.values()]
            made = 0 if self.within else sum(storages(stay).values())
            self.most_nbytes = max(self.most_nbytes, self.held_nbytes + meter.peak_nbytes - made)
            self._end()
        return given

    @contextmanager
    def _measured(self) -> Iterator[MemoryMeter | None]:
        if profiling() and not is_accelerator(self.device):
            yield None
            return
        with watch_memory(self.device) as watch, watch.measured() as meter:
            yield meter
        if is_accelerator(self.device):  # pieces of memory are larger than what was asked for, which no plan can know
            found = allocator_bytes(self.device)
            meter.peak_nbytes -= found.peak - found.peak_requested
            meter.end_nbytes -= found.peak - found.peak_requested

    def _end(self) -> None:
        most, planned = self.most_nbytes, self.plan.peak_nbytes
        if most > limit_of(self.limit_nbytes):
            self.known.takes(most / max(1, planned))
            holder = (
                f"its stages hold {format_nbytes(most - planned)} more than when they were profiled (on the context of "
                "an autograd.Function, in attributes or lists, say); later calls are planned for that"
            )
            self.exceeded.say(most, self.limit_nbytes, holder, strict=self.strict)
