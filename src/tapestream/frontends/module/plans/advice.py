"""What a refused call could do with less."""

from collections.abc import Sequence

from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.module.homes.homes import Homes
from tapestream.frontends.module.homes.tables import may_be_table
from tapestream.frontends.module.observing.observed import Observed
from tapestream.frontends.module.plans.terms import Terms
from tapestream.units import format_nbytes


def after_nbytes(terms: Terms, observed: Observed) -> int:
    """Bytes that the head, its logits and the loss make."""
    last = observed.segments[-1]
    made = last.costs if terms.is_wide(last) else []
    return observed.turn.nbytes + sum(c.output_nbytes + c.saved_nbytes + c.recorded_extra_nbytes for c in made)


def without_cache(error: BudgetError, given_nbytes: int, own_nbytes: int) -> BudgetError:
    """``error``, with what helps where blocks leave something in objects that they are given, as key-value caches are
    filled by default, or in attributes of their own."""
    for nbytes, where in (
        (given_nbytes, "objects that they are given (keys and values, in a cache): a transformers model keeps none if "
         "it is called with use_cache=False"),
        (own_nbytes, "attributes, where it stays until they run again: leave out what nobody reads"),
    ):  # fmt: skip
        if nbytes and 20 * nbytes >= (error.least_nbytes or 0):
            error = error.saying(f"{error.message}. Blocks leave {format_nbytes(nbytes)} of that in {where}")
    return error


def without_tables(error: BudgetError, model: nn.Module, blocks: Sequence[nn.Module], homes: Homes) -> BudgetError:
    """``error``, with what helps where embeddings outside the blocks, of which a call reads a few rows, take much."""
    known = [name for name, module in model.named_modules() if module in homes.tables.modules]
    found = [name for name, _ in model.named_modules() if name not in known and may_be_table(model, blocks, name)]
    nbytes = sum(p.nbytes for name in found for p in model.get_submodule(name).parameters())
    if error.least_nbytes is None or not found or 4 * nbytes < error.least_nbytes:
        return error
    folder = ", folder='a/folder/on/a/disk'" if homes.tables.below_is_disk and homes.folder is None else ""
    return error.saying(
        f"{error.message}. {format_nbytes(nbytes)} are rows of which a call reads few: "
        f"stream(..., tables={known + found!r}{folder}) keeps them off the device"
    )


def advised(error: BudgetError, outside: int, turn_nbytes: int, *, in_chunks: bool, named: bool) -> BudgetError:
    """``error``, unless the loss is made ``in_chunks``, with what helps where the logits and the loss take most of what
    the blocks' parts need. ``named``: whether the model says which layer makes the logits."""
    if in_chunks or error.least_nbytes is None or 2 * turn_nbytes <= error.least_nbytes - outside:
        return error
    call = "stream(..., loss_chunks='auto')" if named else "stream(..., loss_chunks='auto', head='name.of.that.layer')"
    return error.saying(
        f"{error.message}. {format_nbytes(turn_nbytes)} of that is made after the blocks (by the head, its logits and "
        f"the loss): for a linear head and F.cross_entropy, {call} never makes all logits"
    )
