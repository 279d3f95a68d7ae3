"""What a call of a loop is given, checked."""

import functools
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import numpy
import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.executor.loop.form import Form
from tapestream.frontends.loop.inputs import Inputs
from tapestream.planning.plan import Plan


def whole(name: str, value: object, least: int) -> int:
    """A whole number of at least ``least``, NumPy's too. Raises InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"Loop: {name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def check_options(adjoint: object, plan: object, compile: object) -> None:
    """Raise InputError for options of a Loop that cannot be, or cannot be together."""
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"Loop: plan= is a Plan (Plan.load reads one from a file), not {type(plan).__name__}")
    if adjoint is not None and not callable(adjoint):
        raise InputError(f"Loop: adjoint= is a function of (state, cotangent), not {type(adjoint).__name__}")
    if adjoint is not None and compile:
        raise InputError(
            "Loop: compile= needs a step on tensors, but with adjoint= the step gets NumPy arrays; leave one out"
        )


def count_of(steps: object, source: Inputs | None, until: Callable[[Any], Any] | None, max_steps: object) -> int | None:
    """How many steps there are, or may be at most: None where only the condition says."""
    rows = None if source is None else source.length
    if until is not None and not callable(until):
        raise InputError(f"Loop: until= is a function of the state, not {until!r}")
    if until is None:
        if max_steps is not None:
            raise InputError(f"Loop: max_steps={max_steps!r} limits a run with until=, which was not given; use steps=")
        if steps is None:
            if rows is None:
                raise InputError("Loop: give steps=, inputs= with a length, or until=")
            return rows
    elif steps is not None:
        raise InputError(f"Loop: steps={steps!r} and until= were both given; limit a run with until= by max_steps=")
    else:
        if max_steps is None:
            return rows
        steps = whole("max_steps", max_steps, 0)
    count = whole("steps", steps, 0)
    if rows is not None and rows < count:
        if until is not None:
            return rows
        raise InputError(f"Loop: {count} steps were asked for, but inputs= has {rows} rows; give a row for each step")
    return count


def fulfilled(condition: Callable[[Any], Any], state: Any) -> bool:
    """Whether ``condition`` accepts ``state``. Raises InputError where it returns no single truth value."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            found = condition(state)
    else:
        found = condition(state)
    if type(found) is bool:
        return found
    if isinstance(found, (torch.Tensor, numpy.ndarray)):
        if found.size != 1 if isinstance(found, numpy.ndarray) else found.numel() != 1:
            raise InputError(
                f"Loop: until= returned {'a tensor' if isinstance(found, torch.Tensor) else 'an array'} of shape "
                f"{tuple(found.shape)}; it must return one truth value for the whole state (use .all() or .any())"
            )
    elif not isinstance(found, (numpy.bool_, Real)):  # a forgotten return would never end the run
        raise InputError(f"Loop: until= returned {found!r}; it must return True or False")
    return bool(found)


def ended_by(condition: Callable[[Any], Any] | None) -> Callable[[Any], bool] | None:
    """`fulfilled` of a state alone."""
    return None if condition is None else functools.partial(fulfilled, condition)


def device_of(form: Form, state: Any, modules: Iterable[nn.Module]) -> torch.device:
    """The one device of the state's tensors and the step's parameters."""
    named = {leaf.device: part.name for part, leaf in zip(form.parts, form.leaves(state), strict=True)
             if isinstance(leaf, torch.Tensor)}  # fmt: skip
    if not named:
        raise InputError("Loop: the state holds no tensor; pass a tensor or a pytree of tensors")
    if len(named) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise InputError(f"Loop: the state lies on several devices ({found}); move it to one with .to(...)")
    (device,) = named
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device != device:
                raise InputError(
                    f"Loop: the step's parameter {name} lies on {parameter.device} while the state lies on {device}; "
                    f"call .to({str(device)!r}) on the module or move the state"
                )
    return device
