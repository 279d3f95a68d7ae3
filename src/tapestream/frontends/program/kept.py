"""What Functions keep on their contexts, against the budget."""

from tapestream.executor.program.noting.contexts import Contexts
from tapestream.planning.exceeded import Exceeded, limit_of
from tapestream.units import format_nbytes


def tell_kept(contexts: Contexts, held_nbytes: int, limit_nbytes: int | None, exceeded: Exceeded) -> None:
    """Warn where a call that holds ``held_nbytes`` exceeds its budget by what is kept on contexts besides. Those that
    can run again do so from the next call on."""
    held = held_nbytes + contexts.nbytes
    if limit_nbytes is None or not contexts.nbytes or held <= limit_of(limit_nbytes):
        return
    names = ", ".join(sorted({*contexts.names, *contexts.stuck}))
    advice = "use ctx.save_for_backward in it" if contexts.stuck else "from the next call on, it runs again instead"
    holder = f"autograd.Function {names} keeps {format_nbytes(contexts.nbytes)} on its context; {advice}"
    exceeded.say(held, limit_nbytes, holder)
