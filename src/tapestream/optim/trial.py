"""Which way an optimizer can be stepped part by part, found by trying it on a small copy of its groups."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError, TapestreamError
from tapestream.optim import refusals
from tapestream.optim.across import Across
from tapestream.optim.common import Common, Place, Way, copied, same
from tapestream.optim.inner import Inner
from tapestream.optim.small_groups import SmallGroup, various_of
from tapestream.optim.state import OptimizerClass, uncompiled

_CAPS = ((6, 5, 3, 3, 2), (128, 64, 8, 3, 2))  # of dimensions: some optimizers do not take very small tensors
_SCALES = (1.0, 1e4, 1e-3, 30.0)  # of gradients, by step: limits of norms show
_STEPS, _SPARSE_STEPS = 8, 4
_WAYS = (Way(), Way(parameters=True), Way(all_groups=True), Way(parameters=True, all_groups=True))


_NOTHING = object()
_Plain: TypeAlias = tuple[list[Any], Way, bool, set[Place], bool]
"""What a plain run gives: a trace, how it is stepped, whether it draws random numbers, what it writes in common,
whether it makes one tensor of several parameters (see `Across`)."""


@dataclass(slots=True)
class _Case:
    """What is tried: the small groups, what their tensors are at first, and each step's gradients (None: has none)."""

    groups: list[dict[str, Any]]
    starts: list[list[torch.Tensor]]
    gradients: list[list[list[torch.Tensor | None]]]


def way_of(cls: OptimizerClass, required: Mapping[str, Any], groups: Sequence[SmallGroup], device: torch.device) -> Way:
    """The first way in which steps part by part end in the bits of plain PyTorch's: parameters, state, groups and the
    optimizer's attributes, over several steps with gradients of several sizes, all of them or some.

    ``required``: what the constructor is given beside the groups. Raises InputError where there is none, and for an
    optimizer that cannot be tried.
    """
    various = various_of(groups)
    if not various:
        return Way()
    devices = [device] if is_accelerator(device) else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type),
        warnings.catch_warnings(),
        uncompiled(),
    ):
        warnings.simplefilter("ignore")
        case, known, (trace, plain_way, draws, written, mixes) = _tried_plainly(cls, required, various, device)
        if mixes:
            raise InputError(refusals.batches(cls.__name__, alone=_is_taken(cls, required, groups, device)))
        said = ""
        for way in _WAYS:
            tried = replace(plain_way, parameters=way.parameters, all_groups=way.all_groups)
            try:
                torch.default_generator.manual_seed(0)
                differs = _difference(trace, _by_parts(cls, required, case, tried, known), written)
            except TapestreamError as error:
                differs = str(error).partition(": ")[0]
            except Exception as error:
                differs = f"it raises {type(error).__name__} there: {error}"
            if not differs:
                return tried
            said = said or differs
    raise InputError(refusals.differs(cls.__name__, said, draws=draws))


def _is_taken(
    cls: OptimizerClass, required: Mapping[str, Any], groups: Sequence[SmallGroup], device: torch.device
) -> bool:
    """Whether it can be stepped part by part where it treats each tensor by itself."""
    if required.get("foreach") is False or not any("foreach" in group.options for group in groups):
        return False
    small = [replace(group, options={**group.options, "foreach": False}) for group in groups]
    try:
        way_of(cls, {**required, "foreach": False}, small, device)
    except InputError:
        return False
    return True


def _tried_plainly(
    cls: OptimizerClass, required: Mapping[str, Any], groups: Sequence[SmallGroup], device: torch.device
) -> tuple[_Case, int, _Plain]:
    """The case, how many of its steps plain PyTorch takes, and what they give."""
    failed: Exception | None = None
    for cap in _CAPS:
        case = _case(groups, cap, device)
        for steps in (_STEPS + _SPARSE_STEPS, _STEPS):  # some do not take a group without gradients
            try:
                torch.default_generator.manual_seed(0)
                return case, steps, _plainly(cls, required, case, steps)
            except Exception as error:
                failed = error
    assert failed is not None
    raise InputError(
        f"{cls.__name__} could not be tried on small tensors ({type(failed).__name__}: {failed}); tapestream streams "
        "optimizers whose step() needs gradients alone and treats tensors independently, such as AdamW, SGD or Adagrad"
    ) from failed


def _case(groups: Sequence[SmallGroup], cap: Sequence[int], device: torch.device) -> _Case:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").mul_(scale).to(device, dtype)

    shapes = [
        [
            (tuple(min(n, c) for n, c in zip(shape, (*cap, *(2 for _ in shape)), strict=False)), dtype)
            for shape, dtype in g.tensors
        ]
        for g in groups
    ]
    starts = [[drawn(shape, dtype, 1.0) for shape, dtype in group] for group in shapes]
    gradients: list[list[list[torch.Tensor | None]]] = []
    count = sum(map(len, shapes))
    for step in range(_STEPS + _SPARSE_STEPS):
        scale, number = _SCALES[step % len(_SCALES)], 0
        rows: list[list[torch.Tensor | None]] = []
        for row, group in enumerate(shapes):
            rows.append([])
            for shape, dtype in group:
                narrow = 100.0 if dtype is torch.float16 else scale
                made = drawn(shape, dtype, min(scale, narrow) * (1 + number))
                rows[-1].append(None if _is_left_out(step - _STEPS, row, number, len(shapes), count) else made)
                number += 1
        gradients.append(rows)
    return _Case([_shown_options(g.options) for g in groups], starts, gradients)


def _is_left_out(step: int, row: int, number: int, rows: int, count: int) -> bool:
    """Whether a tensor has no gradient in a sparse step: the last, the last group, every other one; then none."""
    return (step == 0 and number == count - 1) or (step == 1 and row == rows - 1) or (step == 2 and number % 2 == 0)


def _shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, with a learning rate that shows."""
    rate = options.get("lr")
    if isinstance(rate, torch.Tensor):
        return {**options, "lr": torch.where(rate.abs() < 1e-2, torch.full_like(rate, 1e-2), rate)}
    return {**options, "lr": 1e-2} if isinstance(rate, float | int) and abs(rate) < 1e-2 else dict(options)


def _plainly(cls: OptimizerClass, required: Mapping[str, Any], case: _Case, steps: int) -> _Plain:
    """Parameters, state and what is common after each step of all tensors at once."""
    rows = [[torch.nn.Parameter(t.clone()) for t in row] for row in case.starts]
    groups = [{**copied(group), "params": row} for group, row in zip(case.groups, rows, strict=True)]
    optimizer = cls(groups, **copied(dict(required)))
    trace, in_place, written = list[Any](), set[tuple[str, Any]](), set[Place]()
    across, mixes = Across(), False
    random = torch.random.get_rng_state()
    calls: list[int] = []
    replaces = writes = False
    for step in range(steps):
        for row, gradients in zip(rows, case.gradients[step], strict=True):
            for parameter, gradient in zip(row, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
        places = _common_places(optimizer)
        before = {place: (value, copied(value)) for place, value in places.items()}
        held = {id(t): t for t in _state_tensors(optimizer)}
        parameters = [p for row in rows for p in row]
        for number, p in enumerate(parameters):
            across.begin(number, (p, p.grad))
        with across:
            optimizer.step()
        mixes = mixes or any(
            across.mixes(number, (p, *optimizer.state.get(p, {}).values())) for number, p in enumerate(parameters)
        )
        writes = writes or any(
            p.grad is not None and g is not None and not same(p.grad, g)
            for row, given in zip(rows, case.gradients[step], strict=True)
            for p, g in zip(row, given, strict=True)
        )
        replaces = replaces or (step > 0 and not held.keys() <= {id(t) for t in _state_tensors(optimizer)})
        for place, value in _common_places(optimizer).items():
            was, copy_of = before.get(place, (_NOTHING, _NOTHING))
            if not same(value, copy_of):
                written.add(place)
                if was is value:
                    in_place.add((place[0], place[2]))
        states = {number: optimizer.state.get(p, {}) for number, p in enumerate(parameters)}
        trace.append(_snapshot([p.detach() for p in parameters], states, _common_places(optimizer)))
    draws = not torch.equal(random, torch.random.get_rng_state())
    _call(optimizer, calls)
    way = Way(
        counts=bool(written),
        in_place=frozenset(in_place),
        replaces=replaces,
        writes_gradients=writes,
        closure_calls=max(1, len(calls)),
    )
    return trace, way, draws, written, mixes


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [state for key, state in optimizer.state.items() if isinstance(key, torch.Tensor)]
    return [t for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]


def _call(optimizer: torch.optim.Optimizer, calls: list[int]) -> None:
    """A last step with a closure, which is counted."""

    def closure() -> float:
        calls.append(1)
        return 0.0

    try:
        optimizer.step(closure)
    except Exception:  # it takes none, or wants a loss with a graph
        calls.clear()


def _common_places(optimizer: torch.optim.Optimizer) -> dict[tuple[str, int, Any], Any]:
    found: dict[tuple[str, int, Any], Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        found.update({("group", number, key): value for key, value in group.items() if key != "params"})
    left_out = ("state", "param_groups", "defaults")
    own = {n: v for n, v in vars(optimizer).items() if n not in left_out and "hook" not in n and not _of_parameters(v)}
    found.update({("attribute", 0, name): value for name, value in own.items()})
    found.update({("state", 0, k): v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)})
    return found


def _of_parameters(value: Any) -> bool:
    """Whether it is, or holds, parameters: what uses them shows in these."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_of_parameters, value))
    return isinstance(value, torch.nn.Parameter)


def _snapshot(parameters: Sequence[torch.Tensor], states: Mapping[int, Any], common: Mapping[Any, Any]) -> Any:
    return [p.clone() for p in parameters], {n: copied(dict(s)) for n, s in states.items()}, dict(copied(dict(common)))


def _by_parts(cls: OptimizerClass, required: Mapping[str, Any], case: _Case, way: Way, steps: int) -> Iterator[Any]:
    """The same, as blocks are updated: first steps one by one, then parts of several sizes, the last one first."""
    memories = [t.clone() for row in case.starts for t in row]
    where = [number for number, row in enumerate(case.starts) for _ in row]
    outer = [copied(group) for group in case.groups]
    small: list[list[torch.Tensor]] = [[torch.nn.Parameter(torch.zeros_like(t)) for t in row] for row in case.starts]
    filled = cls(
        [{**copied(g), "params": s} for g, s in zip(case.groups, small, strict=True)], **copied(dict(required))
    )
    outer = [{k: v for k, v in group.items() if k != "params"} for group in filled.param_groups]
    common = Common(cls.__name__, lambda: outer, way)
    inner = Inner(cls, copied(dict(required)), common, way, lambda number: small[number])
    states: dict[int, dict[str, Any]] = {}
    for step in range(steps):
        gradients = [g for row in case.gradients[step] for g in row]
        for part in _parts(step, [n for n, g in enumerate(gradients) if g is not None], states):
            _step_part(inner, outer, part, memories, where, gradients, states)
        inner.finish(outer)
        found = {("group", n, k): v for n, group in enumerate(outer) for k, v in group.items()}
        found.update({("attribute", 0, k): v for k, v in common.attributes.items()})
        found.update({("state", 0, k): v for k, v in common.state.items()})
        yield _snapshot(memories, {n: states.get(n, {}) for n in range(len(memories))}, found)


def _parts(step: int, numbers: Sequence[int], states: Mapping[int, Any]) -> list[list[int]]:
    new = [n for n in reversed(numbers) if n not in states]
    old = [n for n in reversed(numbers) if n in states]
    size = (1, 2, len(old), 1, 3)[step % 5] or 1
    return [*([n] for n in new), *(sorted(old[at : at + size]) for at in range(0, len(old), size))]


def _step_part(
    inner: Inner,
    outer: Sequence[Mapping[str, Any]],
    part: Sequence[int],
    memories: Sequence[torch.Tensor],
    where: Sequence[int],
    gradients: Sequence[torch.Tensor | None],
    states: dict[int, dict[str, Any]],
) -> None:
    members: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    targets = {}
    for n in part:
        gradient = gradients[n]
        assert gradient is not None
        targets[n] = target = inner.target(memories[n].detach())
        target.grad = gradient.clone()
        members[where[n]].append(target)
        if n in states:
            state[target] = dict(states[n])
    inner.step(outer, members, state)
    for n, target in targets.items():
        with torch.no_grad():
            inner.put_back(target, memories[n])
        made, known = dict(state.get(target, {})), states.get(n)
        for name, value in (known or {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                fits = isinstance(made.get(name, value), torch.Tensor) and made.get(name, value).shape == value.shape
                if not fits:
                    raise TapestreamError(f"its state {name!r} changes its shape from step to step")
                made.setdefault(name, value)
        states[n] = made


def _difference(want: Sequence[Any], got: Iterator[Any], written: set[Place]) -> str:
    """In words; empty where there is none."""
    for step, ((parameters, states, common), (ours, our_states, our_common)) in enumerate(zip(want, got, strict=True)):
        if not all(map(same, parameters, ours)):
            return f"parameters differ after step {step + 1}"
        if not all(same(states[n], our_states[n]) for n in states):
            return f"the state differs after step {step + 1}"
        for place in our_common.keys() | written:
            if not same(common.get(place, _NOTHING), our_common.get(place, _NOTHING)):
                kind, number, key = place
                where = f"param_groups[{number}][{key!r}]" if kind == "group" else f"{kind} {key!r}"
                return f"{where} differs after step {step + 1}"
    return ""
