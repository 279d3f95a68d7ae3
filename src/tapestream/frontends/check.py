"""`verify=True`: a stage that gives two results for one input cannot be recomputed."""

from collections.abc import Sequence

import torch

from tapestream.capture.cells import Cell
from tapestream.capture.observe import UnknownModules, observed
from tapestream.capture.snapshot import Snapshot
from tapestream.errors import GradientError
from tapestream.planning.profile import undisturbed
from tapestream.runner.belongings import Belongings
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State


def check_deterministic(stages: Sequence[Stage], state: State, device: torch.device) -> None:
    """Run every stage twice with the same RNG and buffers; raise GradientError naming the first that differs."""
    for stage in stages:
        own = tuple(Belongings(stage.modules, stage.function).generators)
        cells = _written(stage, state, device, own)
        with undisturbed((stage,), device, own, cells):
            cautious = Traits(
                mutates=frozenset(range(len(state.tensors))),
                buffers=stage.buffer_slots(),
                generators=own,
                cells=cells,
                leaves=tuple(p for p in stage.parameters() if p.requires_grad),
                calls_autograd=True,
                rebinds=True,
            )
            runner = Runner([stage], [cautious], device)
            first = runner.forward(0, [state])
            second = runner.forward(0, [state])
        if not first.same_structure(second):
            raise GradientError(f"{stage.name} returned two structures for one input")
        for a, b in zip(first.tensors, second.tensors, strict=True):
            if a.shape != b.shape or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
                raise GradientError(
                    f"{stage.name} is not deterministic: two runs with the same input, random state and "
                    "buffers differ. Gradients of "
                    "a recomputed stage would be wrong; take its randomness from torch's, Python's or NumPy's "
                    "global generator"
                )
        state = first


def _written(stage: Stage, state: State, device: torch.device, own: Sequence[object]) -> tuple[Cell, ...]:
    """What a run of the stage writes into besides its input and buffers."""
    everything = Traits(mutates=frozenset(range(len(state.tensors))), calls_autograd=True)
    for looks in stage.learning():
        snapshot = Snapshot.of(stage.modules)
        with undisturbed((stage,), device, own):
            try:
                with observed(state.tensors, stage.modules, calls=looks) as seen:
                    Runner([stage], [everything], device, once=(0,)).forward(0, [state])
                seen.put_back()
                return seen.cells
            except UnknownModules as unknown:
                stage.reaches(unknown.modules)
            finally:
                snapshot.put_back()
    raise AssertionError("the last try does not look")
