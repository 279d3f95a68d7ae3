"""Plans that the user brings."""

from tapestream.costs import Budget, Profile
from tapestream.errors import InputError, ScheduleError
from tapestream.planning.plan import Plan


def fit_given_plan(plan: Plan, profile: Profile, budget: Budget) -> Plan:
    """``plan``'s schedule judged on the program at hand.

    Raises InputError when it belongs to another program, BudgetError when it does not fit the budget here.
    """
    if plan.schedule.stages != len(profile):
        raise InputError(
            f"plan= was made for a chain of {plan.schedule.stages} stages, this one has {len(profile)}; make a "
            "plan for this program (plan=None)"
        )
    if len(plan.profile.blocks) != len(profile.blocks):
        raise InputError(
            f"plan= was made for a model with {len(plan.profile.blocks)} parameter blocks, this one has "
            f"{len(profile.blocks)}; "
            "make a plan for this program (plan=None)"
        )
    try:
        return Plan.judged(plan.schedule, profile, budget, plan.machine)
    except ScheduleError as error:
        raise InputError(f"plan= does not fit this program: {error}; make a plan for it (plan=None)") from error
