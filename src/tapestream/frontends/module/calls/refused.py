"""Plans for a training call, beside all that is there; and a call that is refused: into how many parts it fits."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.utils import _pytree as pytree

from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.beside import beside_live, beside_the_rest
from tapestream.frontends.module.calls.gathering import after_a_backward, gathering
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.runner.private import tensors_in

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

T = TypeVar("T")
Prepare: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Prepared | None]
"""Plans for a call with these arguments, as if nothing was there before; None where it drops every block at random."""


def plan_call(
    handle: "Streamed", prepare: Prepare, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Prepared, Prepared] | None:
    """The plans that ``prepare`` makes for this call, and those beside gradients and calls that are there.

    Raises BudgetError, with its ``split``, before the call has changed anything.
    """
    found = or_split(handle, prepare, args, kwargs, lambda: prepare(args, kwargs))
    if found is None:
        return None
    handle.longest.gather(handle)

    def beside() -> Prepared:
        return beside_live(handle, handle._live, found, gathering(handle, found, handle._beside), handle._beside)

    return found, or_split(handle, prepare, args, kwargs, beside)


def or_split(
    handle: "Streamed", prepare: Prepare, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Callable[[], T],
    which: str = "",
) -> T:  # fmt: skip
    """What ``plan`` gives for the call with these arguments. A BudgetError that it raises gets its ``split``, and says
    ``which`` call is meant, if it is not the one that the user makes now."""
    try:
        return plan()
    except BudgetError as error:
        if error.split is not None:  # that of the longest call, for which this one is refused
            raise
        refused = error.to_keep()  # what was observed of the call is dropped before parts of it are
    together = handle.ranks.one_plan is not None  # whose parts may be other ones on other ranks
    parts = iter(()) if together else _numbers_of_parts(handle, prepare, args, kwargs)
    text, split = f"{which}{refused.message}", next(parts, None)
    if split is not None:
        text += f". Cut into {split} equal parts, one after the other, it fits"
    raise refused.saying(text, split=split)


def _numbers_of_parts(
    handle: "Streamed", prepare: Prepare, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[int]:
    """Into how many equal parts the batch may be cut, the fewest first. Each is planned as its call would be, and
    observed without a trace for that; all of these together run hardly more samples than the batch has."""
    samples = samples_of(args, kwargs)

    def fits(number: int) -> bool | None:
        """None: a part of this size cannot be run, be it that BatchNorm needs more than one sample, or that a graph's
        edges lead to rows that are not there: PyTorch writes past the end of a sparse tensor that nobody checks."""
        try:
            with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
                return _fits(handle, prepare, *first_part(args, kwargs, number))
        except BudgetError:
            return False
        except Exception:
            return None

    if samples > 1 and fits(samples) is not False:
        yield from (n for n in range(2, samples + 1) if samples % n == 0 and fits(n))


def samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a batch that can be cut into equal parts along dimension 0; 1 for any other."""
    leaves = pytree.tree_leaves((args, kwargs))
    if tensors_in([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]):
        return 1  # of what an object holds, nobody knows which dimension is the batch
    return next((int(t.shape[0]) for t in leaves if isinstance(t, torch.Tensor) and t.dim()), 1)


def first_part(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first of so many equal parts of a batch: of every tensor that has its samples."""
    samples = samples_of(args, kwargs)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: samples // number] if tensor.dim() and tensor.shape[0] == samples else tensor

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, cut, (args, kwargs))
    return found


def _fits(handle: "Streamed", prepare: Prepare, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether such calls fit, the first one beside the gradients that are there now, the next ones beside its own.
    Raises BudgetError where they do not."""
    found = prepare(args, kwargs)
    if found is None:
        return False
    for plans in (gathering, after_a_backward):
        beside_the_rest(handle, handle._live, found, plans(handle, found, handle._beside), handle._beside)
    return True
