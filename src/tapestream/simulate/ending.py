"""The rules about where things are when a step starts and when it ends."""

from typing import TYPE_CHECKING

from tapestream.ir import Kind, PhaseKind, Tier, Value
from tapestream.simulate.explain import broken, name_of
from tapestream.simulate.places import BLOCK_KINDS, DEVICE, number_of
from tapestream.simulate.shards import check_all_summed

if TYPE_CHECKING:
    from tapestream.simulate.judge import Judge


def check_start(judge: "Judge") -> None:
    """Put what ``schedule.resident`` names where it says."""
    places, memory = judge.places, judge.memory
    for value, tier in judge.schedule.resident:
        if value.kind not in BLOCK_KINDS:
            broken(f"resident names {name_of(value)}; only parameters, buffers, gradients and optimizer state can be")
        places.check(value)
        if places.is_current(value, tier):
            broken(f"resident names {name_of(value)} in {tier.name} twice")
        places.make(value.kind, number_of(value.index, value.part), tier)
        memory.touch(tier.memory)
        if value.kind is Kind.GRADIENT:
            judge.blocks.summed.add(value.index)


def check_end(judge: "Judge") -> None:
    """Everything is done, nothing is left over, and blocks are where ``schedule.resident`` says."""
    places, states = judge.places, judge.states
    if places.flights:
        value = next(iter(places.flights))
        broken(f"{places.whereabouts(value.kind, number_of(value.index, value.part))}; put Wait before the end")
    if judge.phase is None:
        broken("the schedule is empty; it must start with Phase(FORWARD)")
    if places.recorded:
        broken(f"stage {min(places.recorded)} is still recorded; put Backward or Free of its SAVED before the end")
    if states.kept:
        broken(f"state {min(states.kept)} is still kept; put Free of it before the end")
    if places.current[Kind.INSIDE]:
        broken(f"INSIDE {min(places.current[Kind.INSIDE])} is still kept; put its Record or Free of it before the end")
    for k, tiers in places.current[Kind.STATE].items():
        if tiers:
            broken(f"{places.whereabouts(Kind.STATE, k)}; put Free of it before the end")
    if judge.phase is PhaseKind.FORWARD:
        if judge.ends:
            broken("branches that meet have no schedule without Phase(BACKWARD)")
        if judge.recorded:
            broken("a schedule without Phase(BACKWARD) must not Record; use Forward")
        if states.live != judge.n:
            broken(f"the live state must be {judge.n} at the end and is {states.live}")
    elif judge.next_backward >= 0:
        broken(f"Backward({judge.next_backward}) and those below it are missing")
    elif judge.phase is PhaseKind.BACKWARD:
        for start in judge.due:
            if not places.is_current(Value(Kind.COTANGENT, start), DEVICE):
                broken(f"{places.whereabouts(Kind.COTANGENT, start)}, it must be current on DEVICE for the caller")
    for block, parts in judge.blocks.begun.items():
        broken(f"only {parts} of the {len(judge.profile.blocks[block].parts)} parts of block {block} were updated")
    check_all_summed(places)
    _check_residency(judge)


def _check_residency(judge: "Judge") -> None:
    places = judge.places
    wanted: dict[Kind, dict[int, int]] = {kind: {} for kind in BLOCK_KINDS}
    for value, tier in judge.schedule.resident:
        number = number_of(value.index, value.part)
        wanted[value.kind][number] = wanted[value.kind].get(number, 0) | 1 << tier
    for kind in BLOCK_KINDS:
        current, stale = places.current[kind], places.stale[kind]
        for number in sorted(current.keys() | stale.keys() | wanted[kind].keys()):
            found, goal = current.get(number, 0), wanted[kind].get(number, 0)
            if kind is Kind.GRADIENT and not stale.get(number, 0):
                consumed = judge.phase is PhaseKind.STEP or number in judge.blocks.updated
                if not found and consumed and number not in judge.blocks.late:
                    continue
                if found and not goal and not consumed and not judge.blocks.updated:
                    continue
            if found != goal or stale.get(number, 0):
                places_wanted = ", ".join(tier.name for tier in Tier if goal >> tier & 1) or "nowhere"
                broken(
                    f"{places.whereabouts(kind, number)} at the end; at the start of the step it was: {places_wanted}"
                )
    if judge.phase is PhaseKind.BACKWARD:
        for block in sorted(judge.blocks.summed):
            if not places.current[Kind.GRADIENT].get(block, 0):
                broken(f"GRADIENT {block} was freed before the caller or an Update could use it")
