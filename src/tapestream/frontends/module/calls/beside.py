"""Calls that begin while others of the same model await their backward."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.plans.divide import Division
from tapestream.frontends.module.plans.prepare import Prepared, assembled, terms_of
from tapestream.ir.actions import Tier, Value
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.calls.call import StreamCall
    from tapestream.frontends.module.streamed import Streamed

_ENDLESS = 2**62


def prepare_beside(handle: "Streamed", asked: Prepared, prepared: Prepared, calls: Sequence["StreamCall"]) -> Prepared:
    """Plans for the call of ``prepared`` in what live ``calls`` leave of the budget; the same values stay on the
    device. ``asked``: its plans as if nothing was there before.

    Whichever runs while the others wait, all stay within the budget: ``shared_nbytes`` and the ``held_nbytes`` of
    each. Raises BudgetError where too little is left.
    """
    allowed = handle.budget.device_nbytes
    assert allowed is not None
    left, resident = allowed - sum(call.prepared.held_nbytes for call in calls), calls[-1].prepared.resident
    try:
        return _beside(handle, prepared, left, resident)
    except BudgetError as error:
        if error.least_nbytes is None:
            raise  # the host or the disk is too small
        enough = _enough_nbytes(handle, [*(call.asked for call in calls), asked])
        raise BudgetError(
            f"a budget of {format_nbytes(allowed)} was asked for; {format_nbytes(allowed - left)} of it are held by "
            f"{len(calls)} call(s) of this model whose backward has not run yet, and this call, parameters included, "
            f"needs {format_nbytes(error.least_nbytes)}: run that backward first, drop its result, give both batches "
            "to one call" + (f", or allow {enough} bytes for all of them" if enough else ", or allow more"),
            least_nbytes=enough,
        ) from None


def _beside(handle: "Streamed", prepared: Prepared, left: int, resident: frozenset[Value]) -> Prepared:
    if prepared.resident == resident and prepared.shared_nbytes + prepared.held_nbytes <= left:
        return prepared
    return _planned(handle, prepared, left, resident)


def _planned(handle: "Streamed", prepared: Prepared, allowed: int, resident: frozenset[Value] | None) -> Prepared:
    segments, profiles, shared = prepared.segments, prepared.profiles, prepared.shared
    outside = profiles[0].outside_nbytes
    plans = Division(terms_of(handle), segments, profiles, allowed, outside, shared, resident).plans()
    return assembled(
        handle, allowed, segments, plans, profiles, shared, prepared.writes_outside, prepared.late
    )  # fmt: skip


def _enough_nbytes(handle: "Streamed", asked: Sequence[Prepared]) -> int | None:
    """A budget within which all these calls can be live, None where none is found.

    A call alone takes what there is, so that less of a budget may leave the next one less, too: this holds everything
    of all but the last, and what that one cannot do without, or else everything of it too (at home on the device
    always: gradients of calls of one kind are added in the order of plain PyTorch). It is tried by planning one after
    the other.
    """
    before = handle.budget
    try:
        *first, last = _one_after_the_other(handle, asked, _ENDLESS)
        held = sum(one.held_nbytes for one in first)
        found = [max(one.shared_nbytes for one in (*first, last)) + held + last.held_nbytes]
        try:
            _planned(handle, last, 1, first[-1].resident)
        except BudgetError as error:
            if error.least_nbytes is not None and handle.store.home is not Tier.DEVICE:
                found.insert(0, held + error.least_nbytes)
        for enough in found:
            with suppress(BudgetError):
                _one_after_the_other(handle, asked, enough)
                return enough
    finally:
        handle.budget = before
    return None


def _one_after_the_other(handle: "Streamed", asked: Sequence[Prepared], allowed: int) -> list[Prepared]:
    """Plans for live calls within ``allowed`` bytes, which becomes the handle's budget."""
    handle.budget = Budget(allowed, host=handle.budget.host_nbytes, disk=handle.budget.disk_nbytes)
    live: list[Prepared] = []
    for one in asked:
        prepared = gathering(handle, _planned(handle, one, allowed, None), {})
        if live:
            left = allowed - sum(other.held_nbytes for other in live)
            prepared = _beside(handle, prepared, left, live[-1].resident)
        live.append(prepared)
    return live
