"""`make_plan`: run the candidates, let the judge time them, take the fastest that fits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tapestream.costs import Budget, Machine, Profile, UniformStages
from tapestream.errors import Allowance, BudgetError, InputError
from tapestream.ir import Kind, Schedule, Tier, Value
from tapestream.ir.homes import KINDS, HomeLike, home_tiers
from tapestream.passes.host_updates import NONE_HOSTED, Hosted
from tapestream.passes.memory import block_values
from tapestream.passes.residency import UpdateMode
from tapestream.planners import least_seconds, planners
from tapestream.planners.joint import ONLINE
from tapestream.planning.allowances import allowances
from tapestream.planning.apart import best_apart
from tapestream.planning.choices import Terms
from tapestream.planning.fastest import Found, leanest, refined
from tapestream.planning.plan import Alternative, Plan
from tapestream.planning.shortened import shortened
from tapestream.planning.split import Tapes, best_resident, best_split, gradients_may_stay
from tapestream.planning.where import Where, go_on, hosted_blocks
from tapestream.simulate import simulate
from tapestream.system.collector import collector_off
from tapestream.units import format_nbytes

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
    if _has_lower_tier(machine):
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


def _has_lower_tier(machine: Machine | None) -> bool:
    links = machine.links if machine else {}
    return any((tier, Tier.DEVICE) in links and (Tier.DEVICE, tier) in links for tier in (Tier.HOST, Tier.DISK))


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
    **knobs: object,
) -> Plan:
    """The fastest plan found for one training step within ``budget``.

    ``planner``: a name from `tapestream.planners.planners`, with its ``knobs``, or "auto" for the best of all.
    For profiles with parameter blocks: ``home`` is the tier where blocks live that do not stay on the device
    (None: the fastest that ``machine`` links, the device itself if none; of the host what does not fit goes on to the
    disk, see `HomeTiers`), ``resident`` the values that stay
    (None: as many as pays), ``update`` and ``accumulate`` as in `tapestream.passes.stream_parameters`, ``idle_nbytes``
    the most bytes of them that may lie on the device while this chain does not run (None: no limit), ``on_disk`` the
    values that live there because the host has no room (None: as few as will do), ``where`` all blocks are
    updated: on the device, or in HOST, see `hosted_blocks`. Among equally fast plans the one of least peak wins, then
    the simpler.

    Never worse than a planner that it tries is at the same budget (`Plan.fastest_seconds`; with blocks that move, the
    plan that is taken may be 3% slower). Pure; a bounded number of simulations. Raises
    BudgetError when nothing fits (``least_nbytes`` is a device budget that works), InputError for unknown names and
    knobs.
    """
    if planner == "auto" and knobs:
        raise InputError(f"planner='auto' has no knobs, found {', '.join(knobs)}; name the planner that they belong to")
    if update not in ("step", "backward", None):
        raise InputError(f"update is 'step', 'backward' or None, not {update!r}")
    overflowing = KINDS if home is None and _disk_below(machine) else ()
    homes = home_tiers(_fastest_home(machine) if home is None else home, overflowing)
    if homes[Kind.PARAMETERS] is Tier.DEVICE and profile.shards > 1:
        resident = frozenset(value for value, _ in block_values(profile))  # shards, all the time
    hosted = NONE_HOSTED
    if where == "host" and update is not None and not accumulate:
        blocks = hosted_blocks(profile, homes, machine)
        hosted = Hosted(blocks, blocks if update == "step" and go_on(homes) else frozenset())
    if resident is not None:
        resident = frozenset(v for v in resident if v.index not in hosted.blocks or v.kind is Kind.BUFFERS)
    keeping = planner in ("auto", "joint") and profile.may_keep_inside and not profile.ends
    terms = Terms(
        profile, Budget.of(budget), machine, homes, update, resident, accumulate, idle_nbytes, on_disk, keeping, hosted
    )
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
    search, profile, knobs_of = _Search(terms, planners_tried), terms.profile, planners_tried
    plain = profile.without_blocks() if profile.blocks else profile.apart
    staying = profile.with_gradients_staying() if gradients_may_stay(terms) else None
    for name, knobs in knobs_of.items():
        for own in _variants(name, knobs, streamed=bool(profile.blocks)):
            seen = profile if name == "joint" else plain
            search.consider(name, Tapes(partial(_tape, name, terms.machine, own), seen, staying))
    return search.plan(planner)


def _variants(name: str, knobs: dict[str, object], *, streamed: bool) -> Iterator[dict[str, object]]:
    """Knobs to try: where blocks move too, what else moves may be in their way."""
    yield knobs
    if name == "joint" and streamed and not knobs:
        yield {"moves": "none"}


def _tape(name: str, machine: Machine | None, knobs: dict[str, object], profile: Profile, budget: Budget) -> Schedule:
    return planners[name](profile, budget, machine, **knobs)


def _disk_below(machine: Machine | None) -> bool:
    """Whether the host is above a disk."""
    links = machine.links if machine else {}
    return all(ends in links for ends in ((Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)))


def _fastest_home(machine: Machine | None) -> Tier:
    links = machine.links if machine else {}
    near = [tier for tier in (Tier.HOST, Tier.DISK) if (tier, Tier.DEVICE) in links]
    return near[0] if near else Tier.DEVICE


class _Search:
    """Candidates so far."""

    def __init__(self, terms: Terms, tried: Mapping[str, dict[str, object]]) -> None:
        self.terms, self.tried = terms, tried
        self.found: list[Found] = []
        self.alternatives: list[Alternative] = []
        self.refusals: list[tuple[str, BudgetError]] = []
        self.inputs: list[InputError] = []
        self.bound = (
            0.0
            if terms.profile.blocks or terms.profile.ends or terms.keeps_inside or terms.profile.shared is not None
            else least_seconds(terms.profile, terms.budget, terms.machine or Machine())
        )

    def consider(self, name: str, tapes: Tapes) -> None:
        """Let one planner try."""
        if self.found and (why := self._unbeatable(self._fastest)):
            self.alternatives.append((name, None, f"not tried: {why}"))
            return
        try:
            found = self._found(tapes)
        except BudgetError as error:
            self.refusals.append((name, error.to_keep()))
            least = error.least_nbytes
            self.alternatives.append(
                (name, None, "host or disk too small" if least is None else f"needs {format_nbytes(least)}")
            )
            return
        except InputError as error:
            self.inputs.append(error.to_keep())
            self.alternatives.append((name, None, str(error)))
            return
        if found is None:
            self.alternatives.append((name, None, "cannot be faster: its computation or copies alone take longer"))
            return
        self.alternatives.append((name, found.seconds, _summary(found, self.terms) + self._above(found)))
        self.found.append(found)

    @property
    def _moving(self) -> bool:
        """Whether blocks may be elsewhere than on the device."""
        profile, home = self.terms.profile, self.terms.home
        away = home[Kind.PARAMETERS] is not Tier.DEVICE or profile.shards > 1
        return away and any(True for _ in block_values(profile))

    @property
    def _fastest(self) -> Found:
        return min(self.found, key=lambda one: (one.seconds, one.simulation.peak_nbytes[Tier.DEVICE]))

    @property
    def _leanest(self) -> Found:
        found = leanest(self.found, self.terms.profile.runs)
        return replace(found, fastest_seconds=min(one.fastest for one in self.found))

    def _unbeatable(self, found: Found) -> str:
        """Why nothing can be faster; empty where something may be."""
        simulation = found.simulation
        links = self.terms.machine.links if self.terms.machine else {}
        free = not simulation.bytes_moved or not any(link.busy_seconds for link in links.values())
        if free and simulation.stall_seconds == 0 and simulation.forwards == self.terms.profile.runs:
            return "a plan that neither recomputes nor waits was found"
        if self.bound and found.seconds <= self.bound * (1 + 1e-9):
            return "no schedule is faster at this budget"
        return ""

    def _above(self, found: Found) -> str:
        """How far from the lower bound, for plans that recompute or wait."""
        if not self.bound or found.seconds <= self.bound * 1.0005:
            return ""
        return f", at most {found.seconds / self.bound - 1:.1%} above the fastest possible"

    def _found(self, tapes: Tapes) -> Found | None:
        terms = self.terms
        if not any(True for _ in block_values(terms.profile)):
            return best_apart(tapes, terms)
        if not self._moving:
            return best_resident(tapes, terms)
        return best_split(tapes, terms, min((one.fastest for one in self.found), default=float("inf")))

    def plan(self, planner: str) -> Plan:
        """The best found for whoever asked for ``planner``. Raises BudgetError or InputError when there is none."""
        terms = self.terms
        if self.found:
            found = self._refined(self._leanest) if self._moving else self._fastest
            return Plan(
                found.schedule, terms.profile, found.simulation, terms.budget, terms.machine,
                "joint" if planner == "joint" else found.schedule.planner, tuple(self.alternatives),
                fastest_seconds=found.fastest, offers=partial(_offers_beside, terms, planner, self.tried),
            )  # fmt: skip
        if not self.refusals:
            raise InputError(str(self.inputs[0]))
        name, error = min(self.refusals, key=lambda refusal: refusal[1].least_nbytes or 0)
        raise self._refusal(planner, name, error) from None

    def _refined(self, chosen: Found) -> Found:
        """The best that can be made of it, which takes its place in the list."""
        found = refined(chosen, self.found, self.terms)
        for number, (name, seconds, _) in enumerate(self.alternatives):
            if found is not chosen and name == found.schedule.planner and seconds is not None:
                self.alternatives[number] = name, found.seconds, _summary(found, self.terms)
                break
        return found

    def _refusal(self, planner: str, name: str, error: BudgetError) -> BudgetError:
        limit, least = self.terms.budget.device_nbytes, error.least_nbytes
        if limit is None or least is None:
            # The host or the disk is too small: the judge's message says which. A new error: one that is raised by the
            # function that keeps it holds itself, with all frames.
            return BudgetError(error.message, least_nbytes=least, stage=error.stage)
        stage = "" if error.stage is None else f", at stage {error.stage}"
        return BudgetError(
            f"a device budget of {format_nbytes(limit)} ({limit} bytes) was asked for, the least found to work is "
            f"{format_nbytes(least)} ({least} bytes, planner {name}{stage}). Allow that much, or {self._advice()}",
            least_nbytes=least,
            stage=error.stage,
            offers=partial(_offers, self.terms, planner, {name: self.tried[name]}, least),
        )

    def _advice(self) -> str:
        ways = ["use a smaller batch", "cut that stage in two"]
        if self.terms.resident:
            ways.append("keep fewer values resident")
        if self.terms.home[Kind.PARAMETERS] is Tier.DEVICE and any(True for _ in block_values(self.terms.profile)):
            ways.append("let parameters live on the host or in a folder (home=, folder=)")
        return ", ".join(ways[:-1]) + " or " + ways[-1]


def _offers_beside(terms: Terms, planner: str, tried: Mapping[str, dict[str, object]]) -> tuple[Allowance, ...]:
    """Those of a refusal on the same terms."""
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


def _summary(found: Found, terms: Terms) -> str:
    text = f"{found.simulation.forwards} forwards, peak {format_nbytes(found.simulation.peak_nbytes[Tier.DEVICE])}"
    values = dict(block_values(terms.profile))
    if not values or terms.home[Kind.PARAMETERS] is Tier.DEVICE:
        return text
    kept = sum(values.get(value, 0) for value in found.resident)
    return f"{text}, {format_nbytes(kept)} of {format_nbytes(sum(values.values()))} in blocks resident"
