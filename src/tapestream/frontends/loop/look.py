"""Watching the first two steps of a loop: what they write, draw and reach, and whether they need a graph to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError, InputError
from tapestream.executor.loop.form import Form, Leaf
from tapestream.executor.loop.sweep import NAME
from tapestream.executor.loop.traits import StepTraits, Sweep
from tapestream.frontends.loop.reach import generators_behind, tensors_behind
from tapestream.frontends.loop.watch import Mask, Split, Watched, requires_of, watch
from tapestream.planning.profile import collector_off, undisturbed
from tapestream.planning.repeating import check_runs_alike
from tapestream.runner.ambient import Autocast, HostGenerators, TorchGenerators, as_recompute
from tapestream.runner.belongings import Belongings, Change
from tapestream.runner.buffers import BufferSnapshot
from tapestream.runner.captured import leaves_captured
from tapestream.runner.guards import refusing_backward
from tapestream.runner.stage import Stage
from tapestream.runner.state import replica, tensors_in


@dataclass(frozen=True, slots=True)
class Look:
    """The traits; the last state from which a step was watched, and its output; which leaves of outputs carry a
    gradient."""

    traits: StepTraits
    state: Any
    output: Any
    output_requires: Mask


@as_recompute()
@collector_off()
def look_at(
    stage: Stage, state: Any, form: Form, given: Sequence[tuple[Any, ...]], split: Split, device: torch.device,
    *, ended: Callable[[Any], bool] | None = None, verify: bool = False,
) -> Look:  # fmt: skip
    """Watch one step for each of ``given`` (at most two), from ``state``; one alone where ``ended`` accepts its state.

    Generators and buffers are as before afterwards. Raises InputError where the form of the state changes, and with
    ``verify`` GradientError where a step gives two results for one input.
    """
    step, first, own = stage.function, requires_of(form.leaves(state)), tuple(generators_behind(stage.function))
    with undisturbed((stage,), device, own):
        torch_before, host_before = TorchGenerators.capture(device), HostGenerators.capture(own)
        buffers = BufferSnapshot.take(stage.buffer_slots())

        def again() -> None:
            torch_before.restore()
            host_before.restore()
            buffers.put_back()

        belongings = Belongings(stage.modules, step)
        given = [pytree.tree_map_only(torch.Tensor, replica, one) for one in given]
        versions = [t._version for t in tensors_in(given)]
        with refusing_backward(NAME, [*stage.parameters(), *leaves_captured(step)]):
            found = [watch(step, state, first, form, given[0], split, 0)]
        _check_unwritten(versions, given)
        first_written = buffers.changed()

        def repeats() -> bool:
            again()
            once_more = watch(step, state, first, form, given[0], split, 0)
            return _same([(list(form.leaves(once_more.state)), _outputs(once_more))], found)

        left: list[Change] = []
        of_generators = check_runs_alike(stage, belongings, repeats, left)
        mask = found[0].requires
        twice = len(given) > 1 and not (ended is not None and ended(found[0].state))
        for _ in range(2 * twice):
            found.append(watch(step, found[0].state, mask, form, given[1], split, 1))
            if _either(mask, found[-1].requires) == mask:
                break
            mask = _either(mask, found[-1].requires)  # a gradient that takes two steps to arrive
        drew = not torch_before.equals(TorchGenerators.capture(device))
        drew_host = not host_before.equals(HostGenerators.capture(own))
        written = tuple(dict.fromkeys((*first_written, *buffers.changed())))  # two steps may undo each other
        traits = _merged(stage, found, first, mask, device)
        traits = replace(traits, buffers=written, draws_torch=drew, draws_host=drew_host, generators=own)
        traits = replace(traits, leaves_behind=len(left) > len(of_generators))
        again()
        # With a third run the generators were elsewhere when the second began.
        runs = [found[0], found[1]] if len(found) == 2 else [found[0]]
        if traits.sweep is not Sweep.GRAPH and _same(_bare_runs(step, state, form, given, split, len(runs)), runs):
            traits = replace(traits, sweep=Sweep.PLAIN)
        if verify or traits.sweep is not Sweep.PLAIN:  # else the bare runs have shown it
            again()
            check_repeats(found[0].state, watch(step, state, first, form, given[0], split, 0).state, form)
    outputs = tuple(map(any, zip(*(one.output_requires for one in found), strict=True)))
    return Look(traits, found[0].state if twice else state, found[-1].output, outputs)


def _check_unwritten(versions: list[int], given: Sequence[tuple[Any, ...]]) -> None:
    if versions != [t._version for t in tensors_in(given)]:
        raise InputError(
            "Loop: a step writes into its input (inputs=), which belongs to the caller and is given again when the "
            "step is recomputed; clone() it in the step first"
        )


def _merged(stage: Stage, found: list[Watched], first: Mask, mask: Mask, device: torch.device) -> StepTraits:
    autocast = Autocast.capture(device)
    leaves = {id(leaf): leaf for one in found for leaf in (*one.leaves, *one.captured)}
    leaves |= {id(leaf): leaf for leaf in (*stage.parameters(), *tensors_behind(stage.function)) if leaf.requires_grad}
    stand_ins = [(i, leaf.dtype) for i, leaf in enumerate(leaves.values()) if leaf.grad_fn is not None]
    if autocast.enabled:
        casts = frozenset[int]().union(*(one.casts for one in found)).difference(*(one.uncast for one in found))
        dtype = autocast.dtype(device)
        stand_ins += [(i, dtype) for i, (key, leaf) in enumerate(leaves.items()) if key in casts and leaf.is_leaf]
    mutates = frozenset[int]().union(*(one.mutates for one in found))
    return StepTraits(
        sweep=Sweep.GRAPH if any(one.calls_autograd for one in found) else Sweep.HOOKS,
        requires_first=first,
        requires=mask,
        mutates=mutates,
        guarded=bool(mutates) or any(one.escapes for one in found),
        makes_leaves=any(one.makes_leaves for one in found),
        leaves=tuple(leaves.values()),
        stand_ins=tuple(stand_ins),
        aliases=tuple(sorted(frozenset.intersection(*(one.aliases for one in found)))),
        nodes=max(1, *(one.nodes for one in found)),
    )


def _bare_runs(
    step: Callable[..., Any], state: Any, form: Form, given: Sequence[tuple[Any, ...]], split: Split, count: int
) -> list[tuple[Any, Any]]:
    """The same steps under ``no_grad``: states and outputs; none where one raises."""
    leaves = [replica(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in form.leaves(state)]
    pairs: dict[int, Any] = {}
    for old, new in zip(form.leaves(state), leaves, strict=True):
        pairs.setdefault(id(old), new)
    tree, out = form.build([pairs[id(old)] for old in form.leaves(state)]), []
    with torch.no_grad():
        for number in range(count):
            try:
                tree, output = split(step(tree, *given[number]), number)
            except Exception:  # the step differentiates something of its own, or needs its graph otherwise
                return []
            copied = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in form.leaves(tree)]
            out.append((copied, list(Form.of(output).leaves(output))))
    return out


def _same(runs: list[tuple[Any, Any]], found: list[Watched]) -> bool:
    if len(runs) != len(found):
        return False
    for (state, output), one in zip(runs, found, strict=True):
        expected = (*Form.of(one.state).leaves(one.state), *_outputs(one))
        if not all(_equal(a, b) for a, b in zip((*state, *output), expected, strict=True)):
            return False
    return True


def _outputs(one: Watched) -> list[Any]:
    return list(Form.of(one.output).leaves(one.output))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return True
    both = isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return both and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def check_repeats(one: Any, other: Any, form: Form) -> None:
    """Raise GradientError naming the first leaf in which the states after two runs from one state differ."""
    part = first_difference(one, other, form)
    if part is not None:
        raise GradientError(
            f"Loop: the step is not deterministic: two runs with the same state, random state and buffers give "
            f"different {part.name}. Gradients of a recomputed step would be wrong; take its randomness from "
            "torch's, Python's or NumPy's generators, and keep counts in the state"
        )


def first_difference(one: Any, other: Any, form: Form) -> Leaf | None:
    """The first leaf in which two states of that form differ."""
    pairs = zip(form.parts, form.leaves(one), form.leaves(other), strict=True)
    return next((part for part, a, b in pairs if not _repeated(part, a, b)), None)


def _repeated(part: Leaf, a: Any, b: Any) -> bool:
    if part.kind is torch.Tensor:
        return _equal(a, b)
    if part.kind is None:
        return a is b or bool(a == b)
    return bool(numpy.array_equal(a, b, equal_nan=part.dtype.kind in "fc"))


def _either(a: Mask, b: Mask) -> Mask:
    return tuple(x or y for x, y in zip(a, b, strict=True))
