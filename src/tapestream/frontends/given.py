"""What the user brings: plans, stages, devices; and arguments that nobody knows."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from tapestream.accelerator.device import indexed, is_present
from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError, ScheduleError
from tapestream.executor.engines import ENGINES
from tapestream.planners import keywords_of, nearest, planners
from tapestream.planning.plan import Plan

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""By position and by name."""


def arguments_of(batch: Any) -> Arguments:
    """Those of a call with ``batch``: a tensor, a tuple or list of arguments, or a mapping of arguments by name."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def check_knobs(
    what: str, function: Callable[..., Any], planner: str, given: Iterable[str], also: Iterable[str] = ()
) -> None:
    """Raise InputError for a planner that there is not, and for arguments ``given`` beside those of ``function`` that
    it does not have: a misspelt one is not to wait for the first call that plans. ``also``: what any planner takes."""
    knobs = [] if planner == "auto" else keywords_of(planners[planner])
    known = [*knobs, *also]
    for name in (name for name in given if name not in known):
        owners = [repr(other) for other in planners if name in keywords_of(planners[other])]
        has = f"has the knobs {', '.join(known)}" if knobs else "has no knobs"
        meant = f"; planner={' or '.join(owners)} has it" if owners else nearest(name, [*keywords_of(function), *known])
        raise InputError(f"{what} has no argument {name!r}, and planner={planner!r} {has}{meant}")


def check_kinds(engine: str, machine: Any, plan: Any = None, **flags: Any) -> None:
    """Raise InputError for an engine that there is not, for a machine or plan that is none, and for ``flags`` that are
    not True or False."""
    if engine not in ENGINES:
        raise InputError(f"engine={engine!r} was asked for; engines are {', '.join(map(repr, ENGINES))}")
    for name, given, kind, source in (
        ("machine", machine, Machine, "tapestream.measure_machine(folder=...)"),
        ("plan", plan, Plan, "tapestream.plan(...), or tapestream.Plan.load(path)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise InputError(f"{name}={given!r} is no {kind.__name__}; {source} gives one")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name}={flag!r} was given; it is True or False")


def check_not_inference(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise InputError for tensors that were made in inference mode, which backward cannot use."""
    for tensor in tensors:
        if tensor.is_inference():
            raise InputError(
                f"{what}: a tensor of shape {tuple(tensor.shape)} was made in inference mode; clone() it outside of "
                "inference mode, or make it under torch.no_grad()"
            )


def named_device(device: torch.device | str | None) -> torch.device | None:
    """The device that was named, with its number. Raises InputError for one that PyTorch does not know, and one that
    is not served."""
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            f"device={device!r} was asked for; devices are 'cpu', 'cuda' and 'cuda:0', 'cuda:1', .."
        ) from None
    if found is None:
        return None
    if not is_present(found):
        missing = "CUDA GPU" if found.type == "cuda" else f"device of the kind {found.type!r}"
        elsewhere = "; ts.plan(..., machine=ts.Machine()) and `tapestream plan` plan for a GPU that is elsewhere"
        planned = elsewhere if found.type == "cuda" else ""
        raise InputError(
            f"device={str(device)!r} was asked for, but PyTorch finds no {missing}; use device='cpu'{planned}"
        )
    return indexed(found)


def listed(what: str, stages: Any) -> list[Any]:
    """The stages in a list. Raises InputError where there are none."""
    found = list(stages) if isinstance(stages, Iterable) else []
    if not found:
        kind = "an empty one" if isinstance(stages, Iterable) else type(stages).__name__
        raise InputError(f"{what}: at least one stage is needed, in a list; found {kind}")
    return found


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


def is_device(asked: torch.device, found: set[torch.device]) -> bool:
    """Whether the only device ``found`` is the one that was ``asked`` for, of any index where none was named."""
    (device,) = found
    return device.type == asked.type and asked.index in (None, device.index)
