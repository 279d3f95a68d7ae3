"""`ForwardOnly`: calls of a streamed model that record nothing; the next blocks come while one computes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.errors import BudgetError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.copies import SHOWN
from tapestream.executor.doubts import Doubts
from tapestream.frontends.module.calls.measured import Gauge, Measured, look_at_call
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.planning.exceeded import limit_of
from tapestream.runner.private import tensors_in
from tapestream.runner.state import storages
from tapestream.storage.meter import watch_memory
from tapestream.system.collector import collector_off
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

# Sizes up to this many times those measured are served by a measurement; attention's bytes grow with their square.
_SERVES_UP_TO = 1.25
# Where they have grown beyond that, what a new measurement will find is still guessed, up to here.
_GUESSES_UP_TO = 2.0

Call = Callable[..., Any]


@dataclass(slots=True)
class Walk:
    """Where a call stands in the ``order`` of its blocks. ``limit_nbytes``: of the device, for parameter blocks;
    ``staying``: blocks that are left there for the calls to come."""

    order: tuple[int, ...]
    limit_nbytes: int
    staying: frozenset[int]
    at: int = 0


class ForwardOnly:
    """The calls of one model without gradients.

    The first call of a kind and size brings one block at a time and measures what it makes beside them. Those after
    it know what the budget leaves to blocks: the next ones are brought while one computes, as many as fit. From the
    second of such calls in a row (decoding calls every block once per token) a fixed set of blocks stays on the
    device, spread evenly, so that the link is busy throughout; whatever else is replaced, the same bytes would have
    to come. It ends with the next training call. Blocks called alone, or while a backward is awaited, are brought
    one at a time.
    """

    def __init__(self, handle: "Streamed") -> None:
        self._handle = handle
        self._known: dict[object, list[Measured]] = {}
        self._walk: Walk | None = None
        self._gauge: Gauge | None = None
        self._between: contextlib.ExitStack | None = None  # the section of what runs between blocks
        self._inside = False  # a model's call is under way
        self._repeats = 0  # calls since the last training call
        self._limited = 0  # the limit of the last call
        self._outside_nbytes: int | None = None
        self._kept: frozenset[Value] = frozenset()
        self._doubts = Doubts(handle.device)

    def settle(self) -> None:
        """Raise GradientError where a call has written into parameters in a way that was not seen while it ran."""
        self._doubts.settle()

    def forget(self) -> None:
        """Other bytes than those measured will be held: measure again."""
        self._known.clear()
        self._outside_nbytes = None

    def end(self) -> None:
        """A training call begins: blocks that stayed for the calls without gradients go home. Raises as `settle`."""
        self._doubts.settle()
        self._repeats = 0
        if self._kept:
            copies, kept = self._handle.store.copies, self._kept
            self._kept = frozenset()
            if kept <= copies.resident:  # else others have placed everything anew
                with torch.inference_mode(False):
                    self._handle.store.place(copies.resident - kept)

    # -- calls ------------------------------------------------------------------------------------------------------

    def call_model(self, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, beside: bool) -> Any:
        """The model's ``__call__``. ``beside``: other calls await their backward.

        Raises BudgetError for a call that takes more than the budget: as soon as that is known, which of the first of a
        kind it is when it has been measured.
        """
        stays = self._handle.store.home is Tier.DEVICE
        if self._inside or beside or (stays and self._handle.budget.device_nbytes is None):
            return original(*args, **kwargs)
        given = sum(storages(tensors_in([args, kwargs])).values())
        kind, sizes = look_at_call(self._handle, args, kwargs, given)
        known = self._known.setdefault(kind, [])
        nearest = min(known, key=lambda one: (one.growth(sizes) > _SERVES_UP_TO, one.estimate(sizes)), default=None)
        if nearest is not None and self._excess(nearest, sizes) > 0:
            if nearest.sizes == sizes:
                self._refuse(nearest, sizes)
            nearest = None  # a guess: what it takes, measuring shows
        self._inside = True
        try:
            if nearest is not None and stays:
                return original(*args, **kwargs)
            if nearest is not None and nearest.growth(sizes) <= _SERVES_UP_TO:
                return self._run(original, args, kwargs, nearest, self._limit(nearest, sizes, given))
            if nearest is not None and nearest.growth(sizes) <= _GUESSES_UP_TO:
                with torch.inference_mode(False):
                    self._make_room(self._limit(nearest, sizes, given), self._largest(nearest.order))
            else:
                self.end()
            if torch._C._autograd._profiler_enabled():  # nothing can be measured in one
                return original(*args, **kwargs)
            result, found = self._measure(original, args, kwargs, sizes)
            known[:] = [one for one in known if found.growth(one.sizes) > 1 or one.growth(found.sizes) > 1]
            known.append(found)
            if self._excess(found, sizes) > 0:
                self._refuse(found, sizes)
            return result
        finally:
            self._inside = False

    def _needed(self, measured: Measured, sizes: tuple[int, ...]) -> int:
        """Device bytes of a call that brings one block at a time, beside its arguments, which are the caller's."""
        handle, stays = self._handle, self._handle.store.home is Tier.DEVICE
        parameters = handle.model.parameters() if stays else [*handle.outside_parameters(), *handle.pinned.parameters()]
        held = sum(tensor_nbytes(p) + (0 if p.grad is None else tensor_nbytes(p.grad)) + handle.state_nbytes(p)
                   for p in parameters)  # fmt: skip
        held += sum(tensor_nbytes(b) for b in handle.model.buffers())
        return held + measured.estimate(sizes) + (0 if stays else self._largest(measured.order))

    def _excess(self, measured: Measured, sizes: tuple[int, ...]) -> float:
        """So much more than the budget the call takes."""
        budget = self._handle.budget.device_nbytes
        return 0 if budget is None else self._needed(measured, sizes) - limit_of(budget)

    def _refuse(self, measured: Measured, sizes: tuple[int, ...]) -> None:
        """Raise BudgetError with the least that the call works within."""
        budget, least = self._handle.budget.device_nbytes, self._needed(measured, sizes)
        assert budget is not None
        raise BudgetError(
            f"a budget of {format_nbytes(budget)} was asked for, but a call without gradients of this size needs at "
            f"least {format_nbytes(least)} ({least} bytes), with one block on the device at a time; allow that much, "
            "or give it less at once (a smaller batch, shorter sequences)",
            least_nbytes=least,
        )

    def _limit(self, measured: Measured, sizes: tuple[int, ...], given: int) -> int:
        """What the budget leaves to parameter blocks, and to all else that the store holds on the device."""
        budget = self._handle.budget.device_nbytes
        assert budget is not None
        if self._outside_nbytes is None:
            self._outside_nbytes = outside_nbytes(self._handle)
        return budget - self._outside_nbytes - given - measured.estimate(sizes)

    def _run(
        self, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any], measured: Measured, limit: int
    ) -> Any:
        store = self._handle.store
        try:
            with torch.inference_mode(False):
                if limit < self._limited:
                    store.pool.trim()  # released regions wait for the next call, within what was the limit
                self._limited = limit
                self._make_room(limit, self._largest(measured.order))
                self._repeats += 1
                staying = self._chosen(measured.order, limit) if self._repeats > 1 else frozenset[int]()
                self._walk = Walk(measured.order, limit, staying)
                self._look_ahead()
            return original(*args, **kwargs)
        finally:
            self._walk = None
            with torch.inference_mode(False):
                self._doubts.call_ended()
                store.drop_ahead()

    def _measure(
        self, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: tuple[int, ...]
    ) -> tuple[Any, Measured]:
        with watch_memory(self._handle.device) as watch, collector_off():
            self._gauge = gauge = Gauge(watch)
            try:
                self._resume()
                result = original(*args, **kwargs)
            finally:
                self._pause()
                self._gauge = None
        return result, Measured(sizes, gauge.top_nbytes, tuple(gauge.order))

    def _resume(self) -> None:
        if self._gauge is not None:
            self._between = contextlib.ExitStack()
            self._between.enter_context(self._gauge.section())

    def _pause(self) -> None:
        if self._between is not None:
            self._between.close()
            self._between = None

    # -- blocks -----------------------------------------------------------------------------------------------------

    def call_block(self, block: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The ``__call__`` of a block of code that uses parameter block ``block``."""
        store = self._handle.store
        if store.home is Tier.DEVICE:
            return original(*args, **kwargs)
        self._pause()
        with torch.inference_mode(False):  # the bytes will be used with gradients too
            staying = self._advance(block)
            brought = store.lend(block)
            if self._walk is None:
                store.pool.trim()  # nobody knows how much the block makes
            regions = store.copies.device_regions(block)
            store.engine.compute_begins(regions)
            before = store.loans.look(block) if brought else None
        measuring = contextlib.nullcontext() if self._gauge is None else self._gauge.section()
        try:
            with measuring, _uncached():
                return original(*args, **kwargs)
        finally:
            with torch.inference_mode(False):
                store.engine.compute_ended(regions)
                if staying and brought and store.keep(block):
                    self._kept |= frozenset(store.copies.shown_values(block))
                elif before is not None:
                    after, watched = store.loans.look(block), self._walk is None
                    written = self._doubts.has_written(block, f"block {block}", before, after, watched=watched)
                    store.give_back(block, written=written)
                if self._walk is not None:
                    store.advance_ahead(self._walk.limit_nbytes)
            self._resume()

    def _advance(self, block: int) -> bool:
        """``block`` is called: look ahead from there; returns whether it is to stay on the device."""
        if self._gauge is not None:
            self._gauge.order.append(block)
        walk = self._walk
        if walk is None:
            return False
        if block not in walk.order[walk.at :]:  # not as before: look ahead no more
            walk.order = ()
            self._handle.store.drop_ahead()
            return False
        walk.at = walk.order.index(block, walk.at)
        self._look_ahead()
        walk.at += 1
        return block in walk.staying

    def _look_ahead(self) -> None:
        walk = self._walk
        assert walk is not None
        for block in walk.order[walk.at :]:
            if not self._handle.store.look_ahead(block, walk.limit_nbytes):
                return

    # -- what stays -------------------------------------------------------------------------------------------------

    def _largest(self, order: Sequence[int]) -> int:
        return max((_nbytes(self._handle.store, block) for block in order), default=0)

    def _make_room(self, limit: int, needed: int) -> None:
        """Send home what lives on the device, as far as ``needed`` bytes do not fit beside it: optimizer state and
        what stayed last first."""
        store = self._handle.store
        copies, excess = store.copies, store.pool.held_nbytes(Tier.DEVICE) + needed - limit
        leaving: set[Value] = set()
        movable = copies.resident - self._handle.pinned.values()
        for value in sorted(movable, key=lambda v: (v.kind in SHOWN, v not in self._kept, -v.index)):
            if excess > 0 and copies.has(value, Tier.DEVICE) and value.kind is not Kind.GRADIENT:
                leaving.add(value)
                excess -= copies.region(value, Tier.DEVICE).nbytes
        if leaving:
            store.place(copies.resident - leaving)
            self._kept -= leaving

    def _chosen(self, order: Sequence[int], limit: int) -> frozenset[int]:
        """Blocks that may stay: beside what lives on the device already, and two that come and go."""
        store = self._handle.store
        coming = [b for b in dict.fromkeys(order) if not store.copies.lives_on_device(b)]
        total, largest = sum(_nbytes(store, b) for b in coming), self._largest(coming)
        room = limit - store.pool.held_nbytes(Tier.DEVICE)
        if total <= room:
            return frozenset(coming)
        room -= 2 * largest
        if room <= 0:
            return frozenset()
        coming.pop()  # the last one comes each time: while it runs, nothing else could
        chosen, share = set(), room / sum(_nbytes(store, b) for b in coming)
        credit = (1 - share) * largest  # the first one stays: nothing could run while it came
        for block in coming:
            nbytes = _nbytes(store, block)
            credit += share * nbytes
            if nbytes <= min(credit, room):
                chosen.add(block)
                credit, room = credit - nbytes, room - nbytes
        return frozenset(chosen)


def _nbytes(store: BlockStore, block: int) -> int:
    return store.blocks[block].parameters_nbytes


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Autocast keeps no casts: they would stay until it ends, and outlive the bytes that they were made of."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
