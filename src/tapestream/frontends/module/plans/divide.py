"""`Division`: the device budget divided between the segments of one call, and the plans that keep to it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.below import NEVER_MOVE
from tapestream.frontends.given import fit_given_plan
from tapestream.frontends.module.plans.needs import (
    blocks_nbytes,
    kept_nbytes,
    least_beside,
    loses,
    most_needed,
    seconds_of,
    shares_of,
    too_little,
    too_little_beside,
)
from tapestream.frontends.module.plans.offered import PlannedCall, ample_nbytes, offering
from tapestream.frontends.module.plans.shared import Shared
from tapestream.frontends.module.plans.stored import stored_nbytes, too_little_stored
from tapestream.frontends.module.plans.terms import Positioned, Terms
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import home_tiers
from tapestream.passes.memory import block_values
from tapestream.passes.residence import idle_nbytes
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes

_HARDLY = 0.005  # of a step


@dataclass(frozen=True, slots=True)
class Division:
    """``profiles``: of the segments, each as if it were alone beside ``outside`` bytes that are always there, all
    within ``allowed`` bytes. ``shared``: blocks that several segments use. ``resident``: block values that stay on the
    device, None where the plans decide.

    Chains of repeated blocks share the budget: what each cannot do without, and of the rest in proportion to its
    needs. A segment of wide modules alone (an embedding, a head) runs while the chains before it wait with their tape
    and those after it have none, so it uses the same bytes as they: it is their *guest*.
    """

    terms: Terms
    segments: Sequence[Positioned]
    profiles: Sequence[Profile]
    allowed: int
    outside: int
    shared: Mapping[int, Shared]
    resident: frozenset[Value] | None = None

    def plans(self) -> list[Plan]:
        """One for each segment. Raises BudgetError with a device budget that works, and with others."""
        try:
            return self._plans()
        except BudgetError as error:
            finds = self.terms.given is None
            # Never a variable: with its traceback it would keep every frame, and what a caller has, until a collection.
            raise (offering(error.to_keep(), self._planned_within, self.profiles) if finds else error) from None

    def _planned_within(self, nbytes: int | None) -> PlannedCall:
        within = replace(self, allowed=ample_nbytes(self.profiles) if nbytes is None else nbytes)
        return PlannedCall(plans := within._plans(), within.peak_nbytes(plans))

    def _plans(self) -> list[Plan]:
        if not self._guests:
            return self._chains(self._hosts, self.allowed, self.outside, self.resident)
        ample = self._ample() if self.resident is None and self._all_may_fit else None
        if ample is not None and not any(map(loses, ample)):
            return ample
        try:
            tight = self._tight()
        except BudgetError:
            if ample is None and self.resident is None:
                ample = self._ample()
            if ample is None:
                raise
            return ample
        if ample is None and self.resident is None and not self._hardly_slower(tight):
            ample = self._ample()
        return tight if ample is None or seconds_of(tight) < seconds_of(ample) else ample

    def peak_nbytes(self, plans: Sequence[Plan]) -> int:
        """Most device bytes that a step by ``plans``, which are those of `plans`, holds."""
        return self.fullest(plans)[0]

    def fullest(self, plans: Sequence[Plan]) -> tuple[int, Sequence[Plan]]:
        """Most device bytes that a step by ``plans``, which are those of `plans`, holds, and the plans that run or wait
        with their tape then; the others' blocks lie there."""
        hosts, guests = [plans[number] for number in self._hosts], [plans[number] for number in self._guests]
        if len(hosts) > 1 and not guests and self._may_store(hosts):
            return stored_nbytes(hosts, self.outside), hosts
        beside = hosts[0].profile.outside_nbytes  # what guests keep lies there, where they come and go
        if beside == self.outside:
            return beside + sum(plan.peak_nbytes - beside for plan in plans), plans
        lying = beside - self.outside + sum(map(self._idle_nbytes, hosts))
        turns = [(plan.peak_nbytes - kept_nbytes(plan.profile) + lying, [plan]) for plan in guests]
        return max([(beside + sum(plan.peak_nbytes - beside for plan in hosts), hosts), *turns], key=lambda one: one[0])

    @property
    def _guests(self) -> list[int]:
        wide = [self.terms.is_wide(segment) for segment in self.segments]
        return [] if all(wide) else [number for number, one in enumerate(wide) if one]

    @property
    def _hosts(self) -> list[int]:
        return [number for number in range(len(self.segments)) if number not in self._guests]

    # -- with everything of the guests on the device -----------------------------------------------------------------

    def _ample(self) -> list[Plan] | None:
        """Plans with all block values of guests on the device throughout, None where that does not fit."""
        guests = self._ample_guests()
        try:
            hosts = self._chains(self._hosts, self.allowed - self._taken(guests), self.outside, None)
        except BudgetError:
            return None
        return self._in_order(guests, dict(zip(self._hosts, hosts, strict=True)))

    def _ample_guests(self) -> dict[int, Plan]:
        guests: dict[int, Plan] = {}
        for number in self._guests:
            profile = self.profiles[number]
            every = frozenset(value for value, _ in block_values(profile))
            guests[number] = self._guest(profile, None, every)
        return guests

    def _taken(self, guests: Mapping[int, Plan]) -> int:
        """Bytes that the hosts do without."""
        return sum(plan.peak_nbytes - self.outside for plan in guests.values())

    @property
    def _all_may_fit(self) -> bool:
        """Whether the device has room for all values of blocks and what is saved of every run."""
        needs = (kept_nbytes(profile) + blocks_nbytes(profile) for profile in self.profiles)
        return self.outside + sum(needs) <= self.allowed

    def _hardly_slower(self, tight: Sequence[Plan]) -> bool:
        """Whether guests that come and go take hardly more time than ones that stay, which is all that could be gained:
        hosts are planned with at least the bytes that they would have beside those, so that they are as fast at
        least."""
        guests = self._ample_guests()
        left, lying = self.allowed - self.outside - self._taken(guests), self._left_by_guests()
        gain = sum(tight[number].seconds - plan.seconds for number, plan in guests.items())
        return left <= lying and gain <= _HARDLY * seconds_of(tight)

    # -- with nothing of the guests on the device but while they run -------------------------------------------------

    def _tight(self) -> list[Plan]:
        """Plans of which guests take what the hosts leave, when it is their turn."""
        room = self.allowed - self.outside
        resident = frozenset[Value]() if self.resident is None else self.resident
        least, kept = self._least_of_guests(resident), self._kept_by_guests()
        together, needed = sum(kept.values()), most_needed(least, kept)
        raised = {host: self._with_turn(host, least, kept) for host in self._hosts}
        try:
            hosts = self._chains(
                self._hosts, self.allowed, self.outside + together, self.resident, raised, max(0, room - needed)
            )
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes >= self.outside + needed:
                raise
            raise self._no_room_for_guests(needed, least, resident) from None
        lying = sum(map(self._idle_nbytes, hosts)) if self.resident is None else 0
        if needed + lying > room:
            raise self._no_room_for_guests(needed + lying, least, resident)
        guests = {
            number: self._guest(self.profiles[number], self.outside + least[number], resident) for number in least
        }
        return self._in_order(guests, dict(zip(self._hosts, hosts, strict=True)))

    def _left_by_guests(self) -> int:
        """Most bytes of values that hosts may leave on the device while guests come and go."""
        needed = most_needed(self._least_of_guests(frozenset()), self._kept_by_guests())
        return self.allowed - self.outside - needed

    def _least_of_guests(self, resident: frozenset[Value]) -> dict[int, int]:
        return {number: self._least_of_guest(self.profiles[number], resident) for number in self._guests}

    def _kept_by_guests(self) -> dict[int, int]:
        return {number: kept_nbytes(self.profiles[number]) for number in self._guests}

    def _with_turn(self, host: int, least: dict[int, int], kept: dict[int, int]) -> Profile:
        """The profile of ``host`` where guests that follow it, up to the next host, run in its turn."""
        following = [h for h in self._hosts if h > host]
        end = following[0] if following else len(self.segments)
        guests = [number for number in least if host < number < end]
        profile = self.profiles[host]
        turn = max((least[number] - kept[number] for number in guests), default=0)
        made = sum(  # by the guests, and with the host's cotangent too
            shared.waiting_nbytes((host, len(profile) - 1), self.profiles[shared.owner].blocks[block])
            for block, shared in self.shared.items()
        )
        return replace(
            profile,
            outside_nbytes=self.outside + sum(kept.values()),
            turn_nbytes=max(profile.turn_nbytes, turn - made),
        )

    def _idle_nbytes(self, plan: Plan) -> int:
        """Bytes of block values that a host leaves on the device while guests before it run, and their updates."""
        return idle_nbytes(plan.schedule, plan.profile, self.terms.update)

    def _no_room_for_guests(self, needed: int, least: Mapping[int, int], resident: frozenset[Value]) -> BudgetError:
        largest = max(least, key=lambda number: least[number])
        module = self.terms.modules[self.segments[largest].positions[0]]
        plan = self._guest(self.profiles[largest], self.outside + least[largest], resident)
        (what, most), *_ = plan.fills.items()
        return too_little_beside(self.allowed, self.outside + needed, module, f"{format_nbytes(most)} are {what}")

    # -- chains of repeated blocks -----------------------------------------------------------------------------------

    def _chains(
        self,
        numbers: Sequence[int],
        allowed: int,
        outside: int,
        resident: frozenset[Value] | None,
        profiles: dict[int, Profile] | None = None,
        idle: int | None = None,
    ) -> list[Plan]:
        """Plans for the segments ``numbers`` within ``allowed`` bytes, ``outside`` of them taken; what they leave on
        the device while none of them runs is within ``idle`` bytes."""
        chosen = [(profiles or self.profiles)[number] for number in numbers]
        terms = self.terms
        if terms.given is not None:
            if len(chosen) > 1:
                raise InputError(f"plan= is for one chain of blocks, this model has {len(chosen)}; use plan=None")
            return [fit_given_plan(terms.given, chosen[0], self._budget(chosen[0], allowed))]
        try:
            shares = self._divided(chosen, allowed, outside, resident)
        except BudgetError as error:
            if not self._may_store() or len(chosen) == 1:
                raise
            stored, least = self._stored(chosen, resident), error.least_nbytes or 0
            if (needed := stored_nbytes(stored, outside)) <= allowed:
                return stored  # although the chains' least, added up, does not fit
            raise (error if least <= needed else too_little_stored(allowed, needed, len(stored))) from None
        lying = [None] * len(chosen) if idle is None or resident is not None else shares_of(chosen, idle)
        return [
            self._plan(profile, outside + nbytes, resident, left)
            for profile, nbytes, left in zip(chosen, shares, lying, strict=True)
        ]

    def _may_store(self, plans: Sequence[Plan] = ()) -> bool:
        """Whether chains may be stored all together, or ``plans`` do so: where nothing moves, and no update comes into
        the backward."""
        at_home = home_tiers(self.terms.home)[Kind.PARAMETERS] is Tier.DEVICE and self.terms.update != "backward"
        return at_home and self.terms.planner in ("auto", "store_all") and not any(map(loses, plans))

    def _stored(self, profiles: Sequence[Profile], resident: frozenset[Value] | None) -> list[Plan]:
        stored = replace(self, terms=replace(self.terms, planner="store_all", knobs={}))
        return [stored._plan(profile, None, resident) for profile in profiles]

    def _divided(
        self, profiles: Sequence[Profile], allowed: int, outside: int, resident: frozenset[Value] | None
    ) -> list[int]:
        """Bytes for each chain beside what is always there: what it cannot do without, and of the rest in proportion
        to its needs.

        Raises BudgetError when the sum of the least is too much.
        """
        room = allowed - outside
        if len(profiles) == 1 and room > 0:
            return [room]  # the planner's own message is the best one
        least = [least_beside(partial(self._plan, profile, resident=resident), outside) for profile in profiles]
        if sum(least) > room:
            raise too_little(allowed, outside, sum(least))
        return [a + b for a, b in zip(least, shares_of(profiles, room - sum(least)), strict=True)]

    def _plan(
        self, profile: Profile, nbytes: int | None, resident: frozenset[Value] | None = None, idle: int | None = None
    ) -> Plan:
        terms = self.terms

        def plan_by(planner: str) -> Plan:
            beside = 0 if planner in ("auto", *NEVER_MOVE) else self._passing_nbytes
            try:
                budget = self._budget(profile, None if nbytes is None else max(1, nbytes - beside))
                return make_plan(
                    profile, budget, terms.machine(), planner=planner, update=terms.update, home=terms.home,
                    resident=resident, idle_nbytes=idle, on_disk=terms.on_disk, where=terms.where,
                    updated_on_device=terms.on_device, **terms.knobs,
                )  # fmt: skip
            except BudgetError as error:
                if not beside or error.least_nbytes is None:
                    raise
                raise BudgetError(
                    f"{error.message}; and {beside} bytes more for what passes through several states, which the model "
                    "holds, too", least_nbytes=error.least_nbytes + beside, stage=error.stage,
                ) from None  # fmt: skip

        plan = plan_by(terms.planner)
        if terms.planner == "auto" and self._states_may_go(plan):
            with suppress(BudgetError, InputError):
                other = plan_by("offload")
                if other.seconds < plan.seconds:
                    plan = replace(other, alternatives=(*plan.alternatives, *other.alternatives))
        return plan

    def _states_may_go(self, plan: Plan) -> bool:
        """Whether moving states may be faster: stages run more often than with every state at hand."""
        home = home_tiers(self.terms.home)[Kind.PARAMETERS]
        again = plan.simulation.forwards >= 2 * len(plan.profile)
        return again and home is not Tier.DEVICE and not self._passing_nbytes

    @property
    def _passing_nbytes(self) -> int:
        """What passes through several states (an encoder's output) is the model's, too: moving it makes no room."""
        known = (getattr(segment, "travellers", None) for segment in self.segments)  # outlines know of none
        return sum(travellers.nbytes for travellers in known if travellers is not None)

    def _guest(self, profile: Profile, nbytes: int | None, resident: frozenset[Value]) -> Plan:
        """A plan for a guest: the user's planner and its knobs are for chains."""
        terms = self.terms
        return make_plan(
            profile, self._budget(profile, nbytes, guest=True), terms.machine(),
            update=terms.update, home=terms.home, resident=resident, on_disk=terms.on_disk,
            where=terms.where, updated_on_device=terms.on_device,
        )  # fmt: skip

    def _least_of_guest(self, profile: Profile, resident: frozenset[Value]) -> int:
        return least_beside(lambda nbytes: self._guest(profile, nbytes, resident), self.outside)

    def _budget(self, profile: Profile, nbytes: int | None, *, guest: bool = False) -> Budget:
        """On the host, guests take no more than their values do, and hosts leave them that. Where what finds no room
        there goes to the disk, each of several hosts has as much of it as its values have of all."""
        host = self.terms.budget.host_nbytes
        if host is not None:
            guests = [self.profiles[number] for number in self._guests]
            theirs = sum(map(blocks_nbytes, guests)) + self._updating_nbytes(guests)
            host = min(host, theirs) if guest else max(host - theirs, host // 2)
        if host is not None and not guest and home_tiers(self.terms.home).overflowing:
            own, every = blocks_nbytes(profile), sum(blocks_nbytes(self.profiles[number]) for number in self._hosts)
            host = own + host - every if host >= every else host * own // every
        return Budget(nbytes, host=host, disk=self.terms.budget.disk_nbytes)

    def _updating_nbytes(self, profiles: Sequence[Profile]) -> int:
        """What updates of theirs in HOST make there: one at a time."""
        costs = (block for profile in profiles for block in profile.blocks if self.terms.where != "device")
        return max((cost.update_extra_nbytes for cost in costs), default=0)

    def _in_order(self, *found: dict[int, Plan]) -> list[Plan]:
        merged = {number: plan for plans in found for number, plan in plans.items()}
        return [merged[number] for number in range(len(self.segments))]
