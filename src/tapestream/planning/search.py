"""`Search`: what planners find on the same terms, and the best of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from tapestream.costs import Machine
from tapestream.errors import Allowance, BudgetError, InputError
from tapestream.ir import Kind, Tier
from tapestream.passes.memory import block_values
from tapestream.planners import least_seconds
from tapestream.planning.choices import Terms
from tapestream.planning.fastest import Found, judged_as, leanest, refined, spared
from tapestream.planning.mixing import best_mix
from tapestream.planning.plan import Alternative, Plan
from tapestream.planning.split import Tapes, best_resident, best_split
from tapestream.units import format_nbytes

Offers: TypeAlias = Callable[[str, str | None, int | None], tuple[Allowance, ...]]
"""See `Search`."""


class Search:
    """Candidates so far. ``offers``: budgets that work for whoever asked for a planner, of a refusal: given the name of
    the planner that needs least and what it needs, or None where something fits."""

    def __init__(self, terms: Terms, offers: Offers) -> None:
        self.terms, self._offers = terms, offers
        self.found: list[Found] = []
        self.alternatives: list[Alternative] = []
        self.refusals: list[tuple[str, BudgetError]] = []
        self.inputs: list[InputError] = []
        self.bound = (
            0.0
            if terms.profile.blocks or terms.profile.ends or terms.keeps_inside
            else least_seconds(terms.profile, terms.budget, terms.machine or Machine())
        )

    def consider(self, name: str, tapes: Tapes) -> None:
        """Let one planner try."""
        if self.found and (why := self._unbeatable(self.fastest)):
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
    def fastest(self) -> Found:
        """Of what was found."""
        return min(self.found, key=lambda one: (one.seconds, one.simulation.peak_nbytes[Tier.DEVICE]))

    @property
    def blocks_on_disk(self) -> frozenset[int]:
        """Those of which something lives there in the plan that is taken."""
        candidate = refined(self._leanest, self.terms).candidate
        return frozenset() if candidate is None else frozenset(value.index for value in candidate.on_disk)

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
            schedule = tapes.within(terms.budget)
            return spared(judged_as(schedule, terms), terms)
        if not self._moving:
            return best_resident(tapes, terms)
        return best_split(tapes, terms, min((one.fastest for one in self.found), default=float("inf")))

    def beside(self, on_device: "Search") -> "Search":
        """What all updates in HOST have found or what none there has, whichever is faster, and the best with some."""
        searches = [search for search in (self, on_device) if search.found]
        if not searches:
            return on_device  # which needs least of the host
        best = min(searches, key=lambda search: search.fastest.seconds)
        chosen = [one for search in searches if (one := search._leanest.candidate) is not None]
        found = best_mix([one.streaming for one in chosen], self.terms, best.fastest.seconds)
        if found is not None:
            how = f"{_summary(found, self.terms)}, some updates in HOST and some on the device"
            best.alternatives.append((found.schedule.planner, found.seconds, how))
            best.found.append(found)
        return best

    def plan(self, planner: str) -> Plan:
        """The best found for whoever asked for ``planner``. Raises BudgetError or InputError when there is none."""
        terms = self.terms
        if self.found:
            found = self._refined(self._leanest) if self._moving else self.fastest
            return Plan(
                found.schedule, terms.profile, found.simulation, terms.budget, terms.machine,
                "joint" if planner == "joint" else found.schedule.planner, tuple(self.alternatives),
                fastest_seconds=found.fastest, offers=partial(self._offers, planner, None, None),
            )  # fmt: skip
        if not self.refusals:
            raise InputError(str(self.inputs[0]))
        name, error = min(self.refusals, key=lambda refusal: refusal[1].least_nbytes or 0)
        raise self._refusal(planner, name, error) from None

    def _refined(self, chosen: Found) -> Found:
        """The best that can be made of it, which takes its place in the list."""
        found = refined(chosen, self.terms)
        for number, (name, seconds, _) in enumerate(self.alternatives):
            if (name, seconds) == (found.schedule.planner, chosen.seconds):
                self.alternatives[number] = name, found.seconds, _summary(found, self.terms)
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
            offers=partial(self._offers, planner, name, least),
        )

    def _advice(self) -> str:
        ways = ["use a smaller batch", "cut that stage in two"]
        if self.terms.resident:
            ways.append("keep fewer values resident")
        if self.terms.home[Kind.PARAMETERS] is Tier.DEVICE and any(True for _ in block_values(self.terms.profile)):
            ways.append("let parameters live on the host or in a folder (home=, folder=)")
        return ", ".join(ways[:-1]) + " or " + ways[-1]


def _summary(found: Found, terms: Terms) -> str:
    text = f"{found.simulation.forwards} forwards, peak {format_nbytes(found.simulation.peak_nbytes[Tier.DEVICE])}"
    values = dict(block_values(terms.profile))
    if not values or terms.home[Kind.PARAMETERS] is Tier.DEVICE:
        return text
    kept = sum(values.get(value, 0) for value in found.resident)
    return f"{text}, {format_nbytes(kept)} of {format_nbytes(sum(values.values()))} in blocks resident"
