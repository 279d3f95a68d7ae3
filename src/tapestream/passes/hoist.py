"""Hoisting: copies of parameter blocks start early and end late, so that they hide behind computation."""

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Schedule
from tapestream.passes.issue import issue
from tapestream.passes.keep import kept_between
from tapestream.passes.memory import block_values, footprint
from tapestream.passes.stays import living_on_host, read_stays
from tapestream.simulate import simulate


def hoist(schedule: Schedule, profile: Profile, budget: Budget | None, machine: Machine | None) -> Schedule:
    """The same computation with the copies of parameter blocks moved to where they cost the least time.

    Every copy in starts as early as ``budget`` allows on device and host (None: no limit), in order of need, in
    the same phase (forward and backward count as one); every copy out is waited for when it has ended or its
    bytes are needed. A clean copy that is needed again before its bytes are is kept, shortest wait first. So no
    more bytes move than before, and the peak stays within the budget wherever it was. A list schedule: good, not
    optimal; where the judge finds it slower (links that hate traffic in both directions), ``schedule`` itself is
    returned.

    For schedules of `stream_parameters`; copies of states stay where they are, and so do those of blocks that are
    divided among ranks. O(actions x look-ahead).
    """
    hoisted = hide_copies(schedule, profile, budget, machine)
    if hoisted is schedule:
        return schedule
    seconds = simulate(schedule, profile, machine).makespan_seconds
    return hoisted if simulate(hoisted, profile, machine).makespan_seconds <= seconds else schedule


def hide_copies(schedule: Schedule, profile: Profile, budget: Budget | None, machine: Machine | None) -> Schedule:
    """`hoist` before the judge is asked whether it helped; ``schedule`` itself when it copies no parameter block."""
    if profile.shards > 1:  # issued early from the beginning
        return schedule
    computation, stays = read_stays(schedule, profile)
    if not any(stay.arrive or stay.leave for stay in stays):
        return schedule
    budget = budget or Budget()
    base = footprint(computation, profile)
    stays = kept_between(computation, stays, base, budget.device_nbytes)
    sizes, lives = dict(block_values(profile)), living_on_host(schedule.resident, stays)
    living = sum(sizes.get(value, 0) for value in lives)
    actions = issue(computation, stays, profile, base, machine, budget=budget, living_nbytes=living).actions
    return Schedule.of(actions, schedule.stages, resident=schedule.resident, planner=schedule.planner)
