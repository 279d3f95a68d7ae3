"""`plan` of a `Chain`, `Join`, `Loop` or `Program`: the plan of a call that is not made, and what would help it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from tapestream.costs import Machine
from tapestream.costs.machine import Links, usual_links
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.chain import Chain
from tapestream.frontends.changed import Planned, changed
from tapestream.frontends.given import Arguments, arguments_of
from tapestream.frontends.join import Join
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.loop.planned import planned_loop
from tapestream.frontends.module.calls.refused import first_part, samples_of
from tapestream.frontends.program.planned import planned_program
from tapestream.frontends.program.program import Program
from tapestream.frontends.suggested import PARTS, helped, remedies_for, tried
from tapestream.ir.actions import Tier
from tapestream.planning.cache import key_of, shapes_of
from tapestream.planning.plan import Plan
from tapestream.planning.remedy import Remedy
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.nesting import covering

Front: TypeAlias = Chain | Loop | Program


def plan_of_call(front: Front, batch: Any, *, suggest: bool) -> Plan:
    """The plan that a call with ``batch`` has, and with ``suggest`` what would make it faster, or would fit. Nothing of
    the call is left. Raises BudgetError where no plan fits, InputError where nothing needs a gradient."""
    given = arguments_of(batch)
    with torch.enable_grad():
        call = _planned(front, *given)
        try:
            plan = call()
        except BudgetError as error:
            if not suggest:
                raise
            refused = error.to_keep()
            raise helped(refused, _tried(front, call, given, None)) from None
        if not suggest:
            return plan
        return replace(plan, remedies=remedies_for(_tried(front, call, given, [plan]), plan.seconds))


def _planned(front: Front, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
    if isinstance(front, Loop):
        return planned_loop(front, args, kwargs)
    if isinstance(front, Program):
        return planned_program(front, args, kwargs)
    if kwargs or (len(args) != 1 and not isinstance(front, Join)):
        raise InputError(
            f"plan: a {type(front).__name__} is called with one state, found {len(args) + len(kwargs)} arguments; "
            "write ts.plan(chain, (state,))"
        )
    return _planned_chain(front, args if isinstance(front, Join) else args[0])


def _planned_chain(chain: Chain, state: Any) -> Planned:
    initial, _ = chain._take_apart(state)
    device = chain._check_device(initial)

    def plan(**options: Any) -> Plan:
        with covering(), reentrant_checkpointing_off():
            if not options:
                return chain._prepare(initial, device).plan
            known = chain._known.find(key_of(initial, chain._mode(), device), shapes_of(initial))
            assert known is not None, "the call was planned as it is before"
            return changed(chain, **options)._planned(known.profiled, dict.fromkeys(Tier, 0), initial, device)

    return plan


def _tried(front: Front, call: Planned, given: Arguments, base: Sequence[Plan] | None) -> Iterator[Remedy]:
    for change, plans in _changes(front, call, given):
        yield from tried(change, plans, base)


def _changes(front: Front, call: Planned, given: Arguments) -> Iterator[tuple[str, Callable[[], Sequence[Plan]]]]:
    """In words, and the plans of all calls that then do the same."""
    name = type(front).__name__

    def with_options(**options: Any) -> Callable[[], Sequence[Plan]]:
        return lambda: [call(**options)]

    if not isinstance(front, Program) and front._given is not None:
        yield f"{name}(..., plan=None)", with_options(plan=None)
        return
    if front.planner not in ("auto", "join"):
        yield f"{name}(..., planner='auto')", with_options(planner="auto")
    if isinstance(front, Loop) and front.chunk is not None:
        yield f"{name}(..., chunk=None)", with_options(chunk=None)
    if front._tiers["folder"] is None and front._tiers["home"] == "auto" and not isinstance(front, Join):
        machine, speeds = _with_disk(front)
        folder = "path/on/a/fast/disk"
        yield f"{name}(..., folder={folder!r}){speeds}", with_options(folder=folder, machine=machine)
    for parts in (
        () if isinstance(front, Loop) else PARTS
    ):  # which dimension of a loop's state is the batch is not known
        if samples_of(*given) % parts == 0:
            yield f"the batch in {parts} equal parts, one after the other", partial(_cut, front, given, parts)


def _with_disk(front: Front) -> tuple[Machine, str]:
    """The links of the front end's tiers and of a disk below them, and in words how fast it is said to be: unless
    ``machine=`` says it, as fast as disks usually are."""
    below = front._below
    assert below is not None, "the call was planned as it is before"
    told = front._tiers["machine"]
    usual = usual_links(below.device.type)
    if told is not None and all(lane in told.links for lane in usual if Tier.DISK in lane):
        return told, ""
    read, write = (link.bytes_per_second for lane, link in usual.items() if Tier.DISK in lane)
    known: Links = below.machine().links if below.tiers else {}
    return Machine(usual | known), f" on a disk of {read / 1e9:g} GB/s in and {write / 1e9:g} GB/s out"


def _cut(front: Front, given: Arguments, parts: int) -> Sequence[Plan]:
    """The same plan for each of the parts."""
    args, kwargs = first_part(*given, parts)
    return [_planned(changed(front), args, kwargs)()] * parts
