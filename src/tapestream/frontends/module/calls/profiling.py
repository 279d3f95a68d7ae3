"""The observed call that plans are made from, repeated until it uses no parameter that a block may send home."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapestream.frontends.module.observing.observe import Observation, StaysPut
from tapestream.frontends.module.observing.observed import Observed
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.private import copies_of

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


def observe_call(
    handle: "Streamed", original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Observed:
    """One observed call, in which no parameter is used that a block might have sent home."""
    handle.begin_measuring()
    while True:
        handle.store.settle()
        handle.pinned.bring()
        handle.observation = Observation(
            handle.model, handle.store, handle.blocks, handle.device, handle.progress,
            called=handle.called, passed=handle.passed, wide=handle.wide, verify=handle.verify,
        )  # fmt: skip
        try:
            with checkpointing_off(), handle.homes.tables.observed():
                found = handle.observation.run(original, *copies_of((args, kwargs)))
            staying = found.used_directly
        except StaysPut as one:
            found, staying = None, frozenset((one.block,))
        finally:
            handle.observation = None
            handle.store.settle()
        if staying <= handle.pinned.blocks and found is not None and not found.again:
            return found
        handle.pinned.add(staying)
        handle.replan()
