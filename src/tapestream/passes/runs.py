"""A computation with the updates of its blocks, and what in it uses each of their values."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tapestream.costs import Profile
from tapestream.ir import Action, Backward, Forward, Phase, PhaseKind, Record, Tier, Update, Value
from tapestream.passes.host_updates import NONE_HOSTED, Hosted, is_on_host
from tapestream.passes.memory import updates_of
from tapestream.passes.residency import UpdateMode
from tapestream.passes.stays import blocks_of, needed_in, needs

_USING = (Forward, Record, Backward, Update)
_STEP = Phase(PhaseKind.STEP)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of neighbouring computations (first and last position) that use one value in ``tier``; whether one updates
    it."""

    start: int
    stop: int
    updates: bool
    tier: Tier


def runs_of(computation: Sequence[Action], profile: Profile) -> dict[Value, list[Run]]:
    """The runs of neighbouring computations that use each value, in order."""
    drafts: dict[Value, list[_Draft]] = {}
    number = 0
    known: dict[Action, tuple[Value, ...]] = {}
    for position, action in enumerate(computation):
        if not isinstance(action, _USING) and not (isinstance(action, Phase) and action == _STEP):
            continue
        if is_on_host(action):  # nothing of it is on the device
            continue
        number += 1  # the step phase counts, so that nothing stays across its start
        wanted = known.get(action)
        if wanted is None:
            wanted = known[action] = tuple(needs(action, profile))
        updates, tier = isinstance(action, Update), needed_in(action, profile)
        for value in wanted:
            found = drafts.setdefault(value, [])
            last = found[-1] if found else None
            if last is not None and last.number == number - 1 and last.tier is tier:
                last.stop, last.updates, last.number = position, updates or last.updates, number
            else:
                found.append(_Draft(position, position, updates, tier, number))
    return {
        value: [Run(one.start, one.stop, one.updates, one.tier) for one in found] for value, found in drafts.items()
    }


@dataclass(slots=True)
class _Draft:
    """A `Run` that may go on; ``number``: of its last computation."""

    start: int
    stop: int
    updates: bool
    tier: Tier
    number: int


def with_updates(
    computation: list[Action], profile: Profile, update: UpdateMode, hosted: Hosted = NONE_HOSTED
) -> list[Action]:
    """The computation and the updates of every block with gradients that it runs backward through, of those ``hosted``
    in HOST: late ones, of the gradients of the step before, first and in order of need. Where ranks sum gradients, one
    backward later, under which the sum goes on."""
    last = {
        block: position
        for position, action in enumerate(computation)
        if isinstance(action, Backward)
        for block in blocks_of(action, profile)
        if profile.blocks[block].gradient_nbytes
    }
    if update is None or not last:
        return computation

    def tier_of(block: int) -> Tier:
        return Tier.HOST if block in hosted.blocks else Tier.DEVICE

    late = _in_order(computation, profile, last.keys() & hosted.late)
    first = [action for block in late for action in updates_of(block, profile, Tier.HOST)]
    computation = [computation[0], *first, *computation[1:]]
    if update == "step":
        steps = (a for block in sorted(last.keys() - hosted.late) for a in updates_of(block, profile, tier_of(block)))
        return [*computation, Phase(PhaseKind.STEP), *steps]
    due = {position + len(first): block for block, position in last.items() if block not in hosted.late}
    found: list[Action] = []
    summed: list[Action] = []
    for position, action in enumerate(computation):
        found.append(action)
        if isinstance(action, Backward):
            found += summed
            summed = []
        if position in due:
            block = due[position]
            (found if profile.shards == 1 else summed).extend(updates_of(block, profile, tier_of(block)))
    return found + summed


def _in_order(computation: Sequence[Action], profile: Profile, blocks: Collection[int]) -> Iterator[int]:
    """Blocks in the order in which they are used."""
    used = (block for action in computation for block in sorted(blocks_of(action, profile)))
    return (block for block in dict.fromkeys(used) if block in blocks)
