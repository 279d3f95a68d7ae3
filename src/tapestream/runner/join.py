"""Stages that write into a view: plain PyTorch's graph then runs past the stages in between, so these become one.

After ``relu_(x)``, x a view of b, the gradient flows to b itself and no longer through what made x from b. Stage by
stage, where others use b or x too, sums would be made in another order; and gradients would have other strides, which
change the bits of kernels after them. Where nothing else uses b, as in a linear layer on three dimensions with a
ReLU in place after it, it is enough to make the strides the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapestream.runner.captured import InTurn
from tapestream.runner.graph import flows_alone
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, take_apart


@dataclass(frozen=True, slots=True)
class Written:
    """Writes into views. ``stretches``: stages to be made one, none overlapping. ``dense``: per stage, the inputs of
    `Traits.dense`."""

    stretches: tuple[range, ...]
    dense: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of a state that is a view. ``made``: the stage that made its base, or the first view of it. ``alone``:
    it shows the base whole and in order, and is all that uses it."""

    made: int
    alone: bool


def views_written(stages: Sequence[Stage], state: State, device: torch.device) -> Written:
    """Run every stage once and look; random generators and buffers are the caller's to put back."""
    stretches: list[range] = []
    dense: list[frozenset[int]] = []
    views: list[_View | None] = [None] * len(state.tensors)
    for k, stage in enumerate(stages):
        probe = Runner([stage], [Traits(mutates=frozenset(range(len(state.tensors))))], device)
        with torch.enable_grad(), probe.autocast.entered(cache=False):
            inputs, edges = probe.guarded(0, state)
            versions = [t._version for t in inputs]
            state, live = take_apart(stage.function(state.tree(inputs)))
        eased = set()
        for i, (t, old, view, edge) in enumerate(zip(inputs, versions, views, edges, strict=True)):
            if view is None or t._version == old:
                continue
            if view.alone and edge is not None and flows_alone(live, t.grad_fn, edge.node):
                eased.add(i)
            else:
                _add(stretches, range(view.made, k + 1))
        dense.append(frozenset(eased))
        starts = {id(t): (edge and edge.node, view) for t, edge, view in zip(inputs, edges, views, strict=True)}
        views = [_view_of(t, starts, live, k) for t in live]
    return Written(tuple(stretches), tuple(dense))


def _view_of(tensor: torch.Tensor, starts: dict[int, Any], live: Sequence[torch.Tensor], k: int) -> _View | None:
    """What ``tensor``, returned by stage ``k``, is a view of. ``starts``: by id of an input, its guard and view."""
    base = tensor if id(tensor) in starts else tensor._base
    if base is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    node, before = starts.get(id(base), (base.grad_fn, None))
    if base is tensor and before is None:
        return None
    whole = tensor.is_contiguous() and base.is_contiguous() and tensor.numel() == base.numel()
    used_once = [t.grad_fn for t in live].count(tensor.grad_fn) == 1
    alone = whole and used_once and node is not None and flows_alone(live, tensor.grad_fn, node)
    return _View(k, alone) if before is None else _View(before.made, before.alone and alone)


def _add(stretches: list[range], new: range) -> None:
    """``new`` ends no earlier than all before it."""
    while stretches and stretches[-1].stop > new.start:
        new = range(min(stretches.pop().start, new.start), new.stop)
    stretches.append(new)


def join(stages: Sequence[Stage], stretches: Sequence[range]) -> list[Stage]:
    """As many stages: of each stretch the last does all the work, and those before it pass their state on."""
    joined = list(stages)
    for stretch in stretches:
        last = stretch[-1]
        for k in stretch[:-1]:
            joined[k] = Stage(k, _pass_on)
        joined[last] = Stage(last, InTurn([stages[k].function for k in stretch]))
        joined[last].name = f"stages {stretch[0]} to {last} (joined: {stages[last].name} writes into a view)"
    return joined


def with_dense(traits: Sequence[Traits], written: Written) -> list[Traits]:
    """The traits, with what was found about writes into views."""
    return [replace(trait, dense=dense) for trait, dense in zip(traits, written.dense, strict=True)]


def _pass_on(state: Any) -> Any:
    return state
