"""What a call keeps beside its tape, against the budget."""

from tapestream.executor.program.noting.contexts import Contexts
from tapestream.planning.exceeded import Exceeded, limit_of
from tapestream.units import format_nbytes


def tell_kept(
    contexts: Contexts, held_nbytes: int, limit_nbytes: int | None, exceeded: Exceeded, *, strict: bool = False
) -> None:
    """Warn where a call that holds ``held_nbytes`` exceeds its budget by what is kept on contexts besides, or by
    operations that are not noted; ``strict``: raise BudgetError. Functions that can run again do so from the next call
    on."""
    kept = contexts.nbytes + contexts.unnoted_nbytes
    if limit_nbytes is None or not kept or held_nbytes + kept <= limit_of(limit_nbytes):
        return
    holders = []
    if contexts.nbytes:
        names = ", ".join(sorted({*contexts.names, *contexts.stuck}))
        advice = "use ctx.save_for_backward in it" if contexts.stuck else "from the next call on, it runs again instead"
        kept_there = format_nbytes(contexts.nbytes)
        holders.append(f"autograd.Function or custom operation {names} keeps {kept_there} on its context; {advice}")
    if contexts.unnoted_nbytes:
        holders.append(
            f"what is saved where forward-mode differentiation computes tangents, or by no torch call, is kept: "
            f"{format_nbytes(contexts.unnoted_nbytes)}; let the steps of a ts.Loop or the stages of a ts.Chain do that"
        )
    exceeded.say(held_nbytes + kept, limit_nbytes, "; ".join(holders), strict=strict)


def tell_strayed(held_nbytes: int, limit_nbytes: int | None, exceeded: Exceeded) -> None:
    """Warn where a call on the fast path exceeds its budget by what it did last, when nothing could be dropped any
    more."""
    if limit_nbytes is not None and held_nbytes > limit_of(limit_nbytes):
        holder = (
            "it began like the call before, which kept everything, and its last operation made or saved more; the next "
            "call of the kind drops what it must"
        )
        exceeded.say(held_nbytes, limit_nbytes, holder)
