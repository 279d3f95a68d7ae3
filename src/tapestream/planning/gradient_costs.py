"""Gradients of leaves in what stages cost: where they count, and where they do not."""

from collections.abc import Sequence
from dataclasses import replace

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.costs import Profile, StageCost
from tapestream.runner.stage import Traits
from tapestream.runner.state import State


def without_set_off(cost: StageCost) -> StageCost:
    """Where gradients are not counted, nothing that comes before they do can be set off against them."""
    return replace(cost, backward_extra_nbytes=max(0, cost.backward_extra_nbytes))


def with_gradients(profile: Profile, traits: Sequence[Traits], initial: State) -> Profile:
    """Each parameter's gradient counts at the stage whose backward makes it: the last one that uses the parameter. That
    of the argument counts at the first."""
    maker = {id(leaf): (k, tensor_nbytes(leaf)) for k, trait in enumerate(traits) for leaf in trait.leaves}
    made = [0] * len(profile)
    for k, nbytes in maker.values():
        made[k] += nbytes
    stages = [
        cost if all(maker[id(leaf)][0] == k for leaf in trait.leaves) else without_set_off(cost)
        for k, (cost, trait) in enumerate(zip(profile.stages, traits, strict=True))
    ]
    made[0] += sum(tensor_nbytes(t) for t, requires in zip(initial.tensors, initial.requires, strict=True) if requires)
    pairs = zip(stages, made, strict=True)
    return replace(profile, stages=tuple(replace(cost, gradient_nbytes=nbytes) for cost, nbytes in pairs))
