"""`Beginning`: a call whose plan is for other blocks begins again, where what has run of it left no trace."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.runner.ambient import HostGenerators, TorchGenerators
from tapestream.runner.private import may_change
from tapestream.runner.stage import modules_below


class UnplannedBlock(Exception):
    """Block ``position`` was called where the plan has none, or as ``why`` says. ``written``: buffers were, by then."""

    def __init__(self, position: int, written: bool, why: str) -> None:
        super().__init__(position)
        self.position, self.written, self.why = position, written, why


@dataclass(frozen=True, slots=True)
class Beginning:
    """What there was when a call began. ``modules``: all of the model, itself first; ``held``: their buffers and
    parameters, each with its version. These are not kept: a buffer in whose place a block puts another is gone then."""

    modules: Sequence[nn.Module]
    generators: tuple[TorchGenerators, HostGenerators]
    held: tuple[tuple[weakref.ref[torch.Tensor] | None, int], ...]

    @classmethod
    def take(cls, modules: Sequence[nn.Module], device: torch.device) -> "Beginning":
        """As things are now. ``modules``: see `Beginning`."""
        return cls(modules, (TorchGenerators.capture(device), HostGenerators.capture()), _held(modules))

    def restore(self, unplanned: UnplannedBlock, args: Any, kwargs: Any) -> None:
        """Generators are again as they were.

        Raises InputError where what has run would count twice: it wrote buffers or parameters (as versions tell,
        or, for kernels that do not tell them, as the profiled call did), or may have written into an object among the
        arguments.
        """
        # Of a tensor that is still there PyTorch gives the same reference again; of one that is gone there is none.
        now = _held(modules_below(self.modules[0]))
        same = len(now) == len(self.held)
        same = same and all(a is b and v == w for (a, v), (b, w) in zip(self.held, now, strict=True))
        if not same or unplanned.written or any(may_change(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            raise cannot_begin_again(unplanned) from None
        torch_generators, host = self.generators
        torch_generators.restore()
        host.restore()


def cannot_begin_again(unplanned: UnplannedBlock) -> InputError:
    """The error that says so."""
    return InputError(
        f"block {unplanned.position} {unplanned.why}, and the call cannot be restarted: keep the order of blocks and "
        "the model's forward the same from call to call, or name other blocks with blocks=[...]"
    )


def _held(modules: Sequence[nn.Module]) -> tuple[tuple[weakref.ref[torch.Tensor] | None, int], ...]:
    held = [t for m in modules for t in (*m._buffers.values(), *m._parameters.values())]
    return tuple([(None, 0) if t is None else (weakref.ref(t), t._version) for t in held])
