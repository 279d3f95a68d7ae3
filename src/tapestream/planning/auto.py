"""`make_plan`: run the candidates, let the judge time them, take the fastest that fits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tapestream.costs import Budget, Machine, Profile, UniformStages
from tapestream.errors import Allowance, BudgetError, InputError
from tapestream.ir import Kind, Schedule, Tier, Value
from tapestream.ir.homes import KINDS, HomeLike, home_tiers
from tapestream.passes.host_updates import NONE_HOSTED
from tapestream.passes.memory import block_values
from tapestream.passes.residency import UpdateMode
from tapestream.planners import planners
from tapestream.planners.joint import ONLINE
from tapestream.planning.allowances import allowances
from tapestream.planning.below import disk_below, fastest_home, has_lower_tier
from tapestream.planning.choices import Terms
from tapestream.planning.plan import Plan
from tapestream.planning.search import Search
from tapestream.planning.shortened import shortened
from tapestream.planning.split import Tapes, gradients_may_stay
from tapestream.planning.where import Where, hosted_at
from tapestream.simulate import simulate
from tapestream.system.collector import collector_off

CANDIDATES = ("store_all", "periodic", "revolve", "bisection", "rotor")
"""Planners that ``planner="auto"`` always tries, the simplest first; see `candidates`."""

_QUICK = ("store_all", "periodic", "revolve", "bisection")
_FEW = 16  # blocks of a chain
_LEAN = ("least_peak",)
_MOVING = ("superneurons", "offload")
_MOVING_EQUAL = ("async_multistage", "double")
_LONG = 2000  # stages; planners with tables, or with many candidates to judge, are for shorter chains
_DEEP = 800  # stages with blocks; of longer chains every plan would take long
_WIDTH = 500  # stages, of a chain that stands for a longer one
_LONGEST = 300_000  # stages that `joint` is for


def candidates(profile: Profile, machine: Machine | None = None) -> tuple[str, ...]:
    """Planners that ``planner="auto"`` tries, in order; their number and the work of each are bounded.

    Left out is what cannot win: planners that move states where there is nowhere to move them, `joint` where it would
    only repeat the others, and all but the first five where parameter blocks are what moves. Those of
    `tapestream.planners.classic` are for whoever names them.
    """
    if profile.ends:
        return ("join",)
    n, stages = len(profile), profile.stages
    equal = isinstance(stages, UniformStages)
    names = list(CANDIDATES)
    if profile.blocks:
        return CANDIDATES
    if n <= _LONG:
        names += _LEAN
    if has_lower_tier(machine):
        if n <= _LONG:
            names += (*_MOVING, *(_MOVING_EQUAL if equal else ()))
        if n <= _LONGEST:
            names.append("joint")
    return tuple(names)


def _competitors(profile: Profile) -> tuple[str, ...]:
    """Planners that `joint` is never slower than where parameter blocks move too: what it gains by itself may be lost
    when they are fitted in, so every schedule competes with its blocks."""
    n, equal = len(profile), isinstance(profile.stages, UniformStages)
    names = list(CANDIDATES)
    if n <= _LONG:
        names += (*_LEAN, *_MOVING, *(_MOVING_EQUAL if equal else ()))
    return (*names, *(("online",) if n <= ONLINE else ()), "joint")


@collector_off()
def make_plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    planner: str = "auto",
    update: UpdateMode = None,
    home: HomeLike | None = None,
    resident: frozenset[Value] | None = None,
    accumulate: bool = False,
    idle_nbytes: int | None = None,
    on_disk: frozenset[Value] | None = None,
    where: Where = "device",
    updated_on_device: frozenset[int] | None = None,
    **knobs: object,
) -> Plan:
    """The fastest plan found for one training step within ``budget``.

    ``planner``: a name from `tapestream.planners.planners`, with its ``knobs``, or "auto" for the best of all.
    For profiles with parameter blocks: ``home`` is the tier where blocks live that do not stay on the device
    (None: the fastest that ``machine`` links, the device itself if none; of the host what does not fit goes on to the
    disk, see `HomeTiers`), ``resident`` the values that stay
    (None: as many as pays), ``update`` and ``accumulate`` as in `tapestream.passes.stream_parameters`, ``idle_nbytes``
    the most bytes of them that may lie on the device while this chain does not run (None: no limit), ``on_disk`` the
    values that live there because the host has no room (None: as few as will do), ``where`` blocks are
    updated: all on the device, or in HOST, or "mixed", see `hosted_at`; ``updated_on_device`` those there then
    (None: as plans decide). Among equally fast plans the one of least peak wins, then the simpler.

    Never worse than a planner that it tries is at the same budget. Pure; a bounded number of simulations. Raises
    BudgetError when nothing fits (``least_nbytes`` is a device budget that works), InputError for unknown names and
    knobs.
    """
    if planner == "auto" and knobs:
        raise InputError(f"planner='auto' has no knobs, found {', '.join(knobs)}; name the planner that they belong to")
    if update not in ("step", "backward", None):
        raise InputError(f"update is 'step', 'backward' or None, not {update!r}")
    overflowing = KINDS if home is None and disk_below(machine) else ()
    homes = home_tiers(fastest_home(machine) if home is None else home, overflowing)
    if homes[Kind.PARAMETERS] is Tier.DEVICE and profile.shards > 1:
        resident = frozenset(value for value, _ in block_values(profile))  # shards, all the time
    there = hosted_at(where, profile, homes, machine, None if accumulate else update, updated_on_device, on_disk)
    mixes = where == "mixed" and updated_on_device is None and bool(there.blocks)
    keeping = planner in ("auto", "joint") and profile.may_keep_inside and not profile.ends
    terms = Terms(
        profile, Budget.of(budget), machine, homes, update, resident, accumulate, idle_nbytes, on_disk, keeping,
        mixes=mixes,
    ).hosting(there)  # fmt: skip
    names: tuple[str, ...] = candidates(profile, machine) if planner == "auto" else (planner,)
    if planner == "joint" and profile.blocks and not profile.ends and not knobs:
        names = _competitors(profile)
    return _search(terms, {name: knobs if name == planner else {} for name in names}, planner)


def _search(terms: Terms, planners_tried: Mapping[str, dict[str, object]], planner: str) -> Plan:
    """The best that these planners, with their knobs, find for whoever asked for ``planner``: where very many blocks
    move, for a chain of fewer, each of which stands for some of them."""
    free = terms.profile.blocks and terms.resident is None and terms.on_disk is None
    short = shortened(terms.profile, _WIDTH) if free and len(terms.profile) > _DEEP else None
    if short is None:
        return _search_all(terms, planners_tried, planner)
    hosted = terms.hosted.standing_for(short.blocks)
    found = _search_all(
        replace(terms, profile=short.profile, keeps_inside=False, hosted=hosted), planners_tried, planner
    )
    schedule = short.lengthened(found.schedule, len(terms.profile))
    simulation = simulate(schedule, terms.profile, terms.machine, terms.budget)
    return replace(found, schedule=schedule, profile=terms.profile, simulation=simulation)


def _search_all(terms: Terms, planners_tried: Mapping[str, dict[str, object]], planner: str) -> Plan:
    found = _hosting(terms, planners_tried)
    return (found.beside(_searched(terms.hosting(NONE_HOSTED), planners_tried)) if terms.mixes else found).plan(planner)


def _hosting(terms: Terms, planners_tried: Mapping[str, dict[str, object]]) -> Search:
    """With updates in HOST going on under the next forward; where the host has no room, only those of blocks of which
    nothing lives on the disk."""
    found, hosted = _searched(terms, planners_tried), terms.hosted
    if found.found or not hosted.late or not terms.home.overflowing or terms.budget.host_nbytes is None:
        return found
    ended = _searched(terms.hosting(replace(hosted, late=frozenset())), planners_tried)
    if not ended.found:
        return found
    late = hosted.late - ended.blocks_on_disk
    going_on = _searched(terms.hosting(replace(hosted, late=late)), planners_tried) if late else ended
    return min((one for one in (going_on, ended) if one.found), key=lambda one: one.fastest.seconds)


def _searched(terms: Terms, planners_tried: Mapping[str, dict[str, object]]) -> Search:
    profile, knobs_of = terms.profile, planners_tried
    search = Search(terms, partial(_offered, terms, knobs_of))
    plain = profile.without_blocks() if profile.blocks else profile
    staying = profile.with_gradients_staying() if gradients_may_stay(terms) else None
    for name, knobs in knobs_of.items():
        for own in _variants(name, knobs, streamed=bool(profile.blocks)):
            seen = profile if name == "joint" else plain
            search.consider(name, Tapes(partial(_tape, name, terms.machine, own), seen, staying))
    return search


def _variants(name: str, knobs: dict[str, object], *, streamed: bool) -> Iterator[dict[str, object]]:
    """Knobs to try: where blocks move too, what else moves may be in their way."""
    yield knobs
    if name == "joint" and streamed and not knobs:
        yield {"moves": "none"}


def _tape(name: str, machine: Machine | None, knobs: dict[str, object], profile: Profile, budget: Budget) -> Schedule:
    return planners[name](profile, budget, machine, **knobs)


def _offered(
    terms: Terms, tried: Mapping[str, dict[str, object]], planner: str, name: str | None, least_nbytes: int | None
) -> tuple[Allowance, ...]:
    """See `Search`; where something fits, those of a refusal on the same terms."""
    if name is not None and least_nbytes is not None:
        return _offers(terms, planner, {name: tried[name]}, least_nbytes)
    try:
        _search(replace(terms, budget=terms.budget.with_device(1)), tried, planner)
    except BudgetError as error:
        return error.budgets
    return ()


def _offers(
    terms: Terms, planner: str, leanest: Mapping[str, dict[str, object]], least_nbytes: int
) -> tuple[Allowance, ...]:
    """Budgets at which steps on these terms work; of a long chain by quick planners alone, which may take longer than
    the best. None where a long chain of blocks moves: its plans take too long to wait for an error."""
    profile, moving = terms.profile, terms.home[Kind.PARAMETERS] is not Tier.DEVICE
    if profile.blocks and moving and len(profile) > _FEW:
        return ()
    few = len(profile) <= 2 * _FEW and not (profile.blocks and moving)
    names = candidates(profile, terms.machine) if profile.ends or few else _QUICK
    names = names if planner in ("auto", "joint") else ()
    tried = {**{name: {} for name in names}, **leanest}

    def within(nbytes: int | None) -> Plan:
        return _search(replace(terms, budget=terms.budget.with_device(nbytes)), tried, planner)

    return allowances(within, least_nbytes)
