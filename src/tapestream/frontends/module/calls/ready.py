"""What is done for a planned call before it begins."""

from typing import TYPE_CHECKING

from tapestream.frontends.around import check_around, check_uncovered
from tapestream.frontends.module.plans.prepare import Prepared

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


def check_ready(handle: "Streamed") -> None:
    """Raise InputError where no call with gradients may begin here."""
    check_uncovered(f"a streamed {type(handle.model).__name__}", "use a ts.Program inside the streamed blocks")
    if handle.optimizer is not None:
        handle.optimizer.check_forward()
    handle._forward_only.end()
    check_around("a streamed model")


def make_ready(handle: "Streamed", prepared: Prepared) -> None:
    """Have block values where the plans of ``prepared`` find them. From now on these are the last ones."""
    handle.ranks.begin(prepared)
    handle.store.settle()
    if prepared is not handle.last:
        handle.homes.reserve(prepared.on_disk)
    handle.store.place(prepared.resident, prepared.below_host(handle.store.copies.on_disk))
    handle.store.adopt_replaced()
    handle.store.gradients.leave()
    handle.store.copies.staying = prepared.at_step
    handle.last = prepared
