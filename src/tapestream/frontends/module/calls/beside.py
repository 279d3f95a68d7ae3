"""Calls that begin while others of the same model await their backward, or have given way and are held."""

from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.gathering import gathering
from tapestream.frontends.module.calls.refusals import Refusals
from tapestream.frontends.module.plans.at_once import Within
from tapestream.frontends.module.plans.prepare import Prepared, planned_again, staying_nbytes, whole_of
from tapestream.ir.actions import Phase, PhaseKind, Tier
from tapestream.planning.exceeded import limit_of
from tapestream.planning.plan import Plan
from tapestream.simulate import device_nbytes
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.calls.call import StreamCall
    from tapestream.frontends.module.calls.live import Live
    from tapestream.frontends.module.streamed import Streamed

_ENDLESS = 2**62

Known = MutableMapping[object, Prepared]


def beside_live(handle: "Streamed", live: "Live", asked: Prepared, prepared: Prepared, known: Known) -> Prepared:
    """``prepared``, or plans in what waiting calls leave of the budget, which are kept in ``known``. ``asked``: its
    plans as if nothing was there before. Where these do not fit, the oldest that can give way do.

    Raises BudgetError where it does not fit beside the others.
    """

    def beside() -> Prepared:
        return _beside_those(handle, list(live.calls), list(live.gave_way), asked, prepared, known, live.refused)

    return live.awaiting.planned(beside, lambda: beside_the_rest(handle, live, asked, prepared, known))


def beside_the_rest(handle: "Streamed", live: "Live", asked: Prepared, prepared: Prepared, known: Known) -> Prepared:
    """The same, as if all that can give way had done so. Raises BudgetError where `beside_live` would."""
    plain, leaving = ([call for call in live.calls if call.plain is is_plain] for is_plain in (True, False))
    return _beside_those(handle, plain, [*live.gave_way, *leaving], asked, prepared, known, live.refused)


def _beside_those(
    handle: "Streamed",
    there: Sequence["StreamCall"],
    gone: Sequence["StreamCall"],
    asked: Prepared,
    prepared: Prepared,
    known: Known,
    refused: Refusals,
) -> Prepared:
    """Beside calls that wait ``there``, and what the user holds of those that have ``gone``. What helps is looked for
    once where nothing fits, not at every step that is skipped."""
    if not there and not gone:
        return prepared
    living = (there[0].prepared.resident, there[0].prepared.overflowed) if there else None
    sizes = tuple(sorted(call.prepared.held_nbytes for call in there)), sum(call.prepared.left_nbytes for call in gone)
    key = id(prepared), living, sizes
    if key not in known:
        known[key] = refused.once(key, lambda: prepare_beside(handle, asked, prepared, there, gone))
    return known[key]


def prepare_beside(
    handle: "Streamed",
    asked: Prepared,
    prepared: Prepared,
    there: Sequence["StreamCall"],
    gone: Sequence["StreamCall"] = (),
) -> Prepared:
    """Plans for the call of ``prepared`` in what calls that are ``there`` leave of the budget; the same values stay on
    the device.

    Whichever runs while the others wait, all stay within the budget: ``shared_nbytes`` and the ``held_nbytes`` of
    each, and of those that the budget says are still to come. What the user holds of those that have ``gone`` is
    mostly dropped when the new loss takes the place of the old one (``loss = model(x)``): it must fit beside the
    forward at the least, and is looked for when backward begins. Raises BudgetError where too little is left.
    """
    live, left = [call.prepared for call in there], sum(call.prepared.left_nbytes for call in gone)
    within = _left_by(handle, live, left)
    try:
        return _beside(handle, prepared, within, live[-1] if live else None)
    except BudgetError as error:
        if not live and _forward_nbytes(handle, prepared) + left <= limit_of(whole_of(handle, strict=False).nbytes):
            return prepared
        raise _refusal(handle, error, within.nbytes, [*(call.asked for call in (*there, *gone)), asked]) from None


def _forward_nbytes(handle: "Streamed", prepared: Prepared) -> int:
    """Most bytes until the backward of such a call begins."""
    loss = prepared.turn.forward_nbytes
    blocks = sum(_until_backward(plan, handle, loss) - staying_nbytes(plan) for plan in prepared.plans)
    return prepared.shared_nbytes + prepared.before_nbytes + blocks


def _until_backward(plan: Plan, handle: "Streamed", loss_nbytes: int) -> int:
    """Of one chain of blocks, what is outside of it not counted; ``loss_nbytes``: of what runs behind it."""
    first = next(n for n, action in enumerate(plan.schedule) if action == Phase(PhaseKind.BACKWARD))
    alone = replace(plan.profile, outside_nbytes=0, turn_nbytes=0)
    *forward, turn = device_nbytes(plan.schedule, alone, handle.machine())[: first + 1]
    return max(*forward, turn - plan.profile.stages[-1].cotangent_bytes + loss_nbytes)


def _left_by(handle: "Streamed", live: Sequence[Prepared], left: int = 0) -> Within:
    """What live calls leave of the budget, and ``left`` bytes, for the next one and those that the budget says are
    still to come."""
    allowed, most, _ = whole_of(handle, strict=False)
    return Within(allowed - left - sum(one.held_nbytes for one in live), max(1, most - len(live)), strict=False)


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
        f"needs {format_nbytes(error.least_nbytes)}: run that backward first, drop its result (del loss), give both "
        f"batches to one call, {advice}",
        least_nbytes=enough,
    )


def _beside(handle: "Streamed", prepared: Prepared, within: Within, other: Prepared | None) -> Prepared:
    """``other``: plans of a call that waits, from which values live where they will."""
    together = prepared.shared_nbytes + within.calls * prepared.held_nbytes
    alike = other is None or (other.resident, other.overflowed) == (prepared.resident, prepared.overflowed)
    return prepared if alike and together <= within.nbytes else _again(handle, prepared, within, other)


def _again(handle: "Streamed", prepared: Prepared, within: Within, other: Prepared | None) -> Prepared:
    resident, on_disk = (None, None) if other is None else (other.resident, other.overflowed)
    return planned_again(handle, prepared, prepared.profiles, prepared.late, resident, within=within, on_disk=on_disk)


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
        least = _least_nbytes(handle, last, 1, first[-1])
        if least is not None and handle.store.home is not Tier.DEVICE:
            found.append(held + least)
        found.append(max(one.shared_nbytes for one in (*first, last)) + held + last.held_nbytes)
        for enough in (nbytes for nbytes in found if nbytes > (handle.budget.device_nbytes or 0)):
            with suppress(BudgetError):
                _one_after_the_other(handle, asked, enough, calls)
                return enough
    return None


def _least_nbytes(handle: "Streamed", one: Prepared, calls: int, other: Prepared | None = None) -> int | None:
    """Bytes within which ``calls`` calls like this one fit at once."""
    try:
        _again(handle, one, Within(1, calls), other)
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
                prepared = _beside(handle, prepared, _left_by(handle, live), live[-1])
            live.append(prepared)
    finally:
        handle.budget = before
    return live
