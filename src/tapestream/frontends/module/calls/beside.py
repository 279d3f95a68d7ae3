"""Calls that begin while others of the same model await their backward."""

from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.plans.at_once import Within
from tapestream.frontends.module.plans.prepare import Prepared, planned_again, whole_of
from tapestream.ir.actions import Tier, Value
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.calls.call import StreamCall
    from tapestream.frontends.module.streamed import Streamed

_ENDLESS = 2**62

Known = MutableMapping[object, Prepared]


def beside_live(
    handle: "Streamed", calls: Iterable["StreamCall"], asked: Prepared, prepared: Prepared, known: Known
) -> Prepared:
    """``prepared``, or plans in what waiting ``calls`` leave of the budget, which are kept in ``known``. ``asked``: its
    plans as if nothing was there before."""
    live = list(calls)
    if not live:
        return prepared
    held = sum(call.prepared.held_nbytes for call in live)
    key = id(prepared), live[0].prepared.resident, held, len(live)
    if key not in known:
        known[key] = prepare_beside(handle, asked, prepared, live)
    return known[key]


def prepare_beside(handle: "Streamed", asked: Prepared, prepared: Prepared, calls: Sequence["StreamCall"]) -> Prepared:
    """Plans for the call of ``prepared`` in what live ``calls`` leave of the budget; the same values stay on the
    device.

    Whichever runs while the others wait, all stay within the budget: ``shared_nbytes`` and the ``held_nbytes`` of
    each, and of those that the budget says are still to come. Raises BudgetError where too little is left.
    """
    live = [call.prepared for call in calls]
    within = _left_by(handle, live)
    try:
        return _beside(handle, prepared, within, live[-1].resident)
    except BudgetError as error:
        raise _refusal(handle, error, within.nbytes, [*(call.asked for call in calls), asked]) from None


def _left_by(handle: "Streamed", live: Sequence[Prepared]) -> Within:
    """What live calls leave of the budget, for the next one and those that the budget says are still to come."""
    allowed, most, _ = whole_of(handle, strict=False)
    return Within(allowed - sum(one.held_nbytes for one in live), max(1, most - len(live)), strict=False)


def _refusal(handle: "Streamed", error: BudgetError, left: int, asked: Sequence[Prepared]) -> BudgetError:
    if error.least_nbytes is None:
        return error  # the host or the disk is too small
    allowed, most, _ = whole_of(handle, strict=False)
    enough = _enough_nbytes(handle, asked)
    advice = f"or allow {enough} bytes for all of them" if enough else "or allow more"
    if most < len(asked) and _fit(handle, asked, allowed):
        advice += f", or say how many there are, so that each gets a part: Budget({allowed}, calls={len(asked)})"
    return BudgetError(
        f"a budget of {format_nbytes(allowed)} was asked for; {format_nbytes(allowed - left)} of it are held by "
        f"{len(asked) - 1} call(s) of this model whose backward has not run yet, and this call, parameters included, "
        f"needs {format_nbytes(error.least_nbytes)}: run that backward first, drop its result, give both batches "
        f"to one call, {advice}",
        least_nbytes=enough,
    )


def _beside(handle: "Streamed", prepared: Prepared, within: Within, resident: frozenset[Value]) -> Prepared:
    together = prepared.shared_nbytes + within.calls * prepared.held_nbytes
    if prepared.resident == resident and together <= within.nbytes:
        return prepared
    return _again(handle, prepared, within, resident)


def _again(handle: "Streamed", prepared: Prepared, within: Within, resident: frozenset[Value] | None) -> Prepared:
    return planned_again(handle, prepared, prepared.profiles, prepared.late, resident, within=within)


def _fit(handle: "Streamed", asked: Sequence[Prepared], allowed: int) -> bool:
    """Whether all these calls can be live within ``allowed`` bytes, if the budget says how many they are."""
    with suppress(BudgetError):
        return bool(_one_after_the_other(handle, asked, allowed, len(asked)))
    return False


def _enough_nbytes(handle: "Streamed", asked: Sequence[Prepared]) -> int | None:
    """A budget within which all these calls can be live, None where none is found.

    A call alone takes what there is, so that less of a budget may leave the next one less, too: this holds everything
    of all but the last, and what that one cannot do without, or else everything of it too (at home on the device
    always: gradients of calls of one kind are added in the order of plain PyTorch). It is tried by planning one after
    the other.
    """
    calls = handle.budget.calls
    alike = (_least_nbytes(handle, one, len(asked)) for one in asked) if calls >= len(asked) else ()
    most = max((nbytes for nbytes in alike if nbytes is not None), default=0)
    found = [int(more * most) for more in (1, 1.1, 1.25, 1.5) if most]  # what one leaves there may be others' too much
    with suppress(BudgetError):
        *first, last = _one_after_the_other(handle, asked, _ENDLESS, calls)
        held = sum(one.held_nbytes for one in first)
        least = _least_nbytes(handle, last, 1, first[-1].resident)
        if least is not None and handle.store.home is not Tier.DEVICE:
            found.append(held + least)
        found.append(max(one.shared_nbytes for one in (*first, last)) + held + last.held_nbytes)
        for enough in (nbytes for nbytes in found if nbytes > (handle.budget.device_nbytes or 0)):
            with suppress(BudgetError):
                _one_after_the_other(handle, asked, enough, calls)
                return enough
    return None


def _least_nbytes(
    handle: "Streamed", one: Prepared, calls: int, resident: frozenset[Value] | None = None
) -> int | None:
    """Bytes within which ``calls`` calls like this one fit at once."""
    try:
        _again(handle, one, Within(1, calls), resident)
    except BudgetError as error:
        return error.least_nbytes
    return None


def _one_after_the_other(handle: "Streamed", asked: Sequence[Prepared], allowed: int, calls: int) -> list[Prepared]:
    """Plans for live calls within ``allowed`` bytes, as if that and ``calls`` were the handle's budget."""
    before, live = handle.budget, list[Prepared]()
    handle.budget = Budget(allowed, host=before.host_nbytes, disk=before.disk_nbytes, calls=calls)
    try:
        for one in asked:
            prepared = gathering(handle, _again(handle, one, whole_of(handle, strict=False), None), {})
            if live:
                prepared = _beside(handle, prepared, _left_by(handle, live), live[-1].resident)
            live.append(prepared)
    finally:
        handle.budget = before
    return live
