"""`Outside`: the optimizer of parameters outside the blocks, which never leave the device."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tapestream.optim.rule import MASTER
from tapestream.optim.state import OptimizerClass


class Outside:
    """A torch optimizer on some parameters; those in ``masters`` (ids) are 16 bits wide, updated as fp32 copies and
    rounded from them."""

    def __init__(
        self,
        cls: OptimizerClass,
        options: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[torch.Tensor],
        masters: frozenset[int],
    ) -> None:
        self._targets = {p: p.detach().float().clone() if id(p) in masters else p for p in parameters}
        self._numbers: list[int] = []  # per inner group, its number among the outer ones
        listed = []
        for number, group in enumerate(groups):
            targets = [self._targets[p] for p in group["params"] if p in self._targets]
            if targets:
                listed.append({**group, "params": targets})
                self._numbers.append(number)
        self._inner = cls(listed, **options)
        self._taken: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []  # gradients, and their versions

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """One step with the hyperparameters of ``groups`` (schedulers change those of the outer optimizer)."""
        for inner, number in zip(self._inner.param_groups, self._numbers, strict=True):
            inner.update({k: v for k, v in groups[number].items() if k != "params"})
        narrow = {p: p.grad for p, target in self._targets.items() if target is p}
        try:
            for p in narrow:
                p.grad = None
            for parameter, target in self._targets.items():  # one at a time: no plan has room for all wide gradients
                if target is not parameter and parameter.grad is not None:
                    self._step_wide(parameter, target)
        finally:
            for p, gradient in narrow.items():
                p.grad = gradient
        if any(gradient is not None for gradient in narrow.values()):
            self._inner.step()
        self._note()

    def _note(self) -> None:
        self._taken = [(p, weakref.ref(p.grad), p.grad._version) for p in self._targets if p.grad is not None]

    def has_taken(self) -> bool:
        """Whether a gradient of the last step, or from before a state was loaded, is still there as it was."""
        return any(p.grad is not None and p.grad is g() and p.grad._version == at for p, g, at in self._taken)

    def _step_wide(self, parameter: torch.Tensor, target: torch.Tensor) -> None:
        assert parameter.grad is not None
        target.grad = parameter.grad.to(target.dtype)
        try:
            self._inner.step()
        finally:
            target.grad = None
        with torch.no_grad():
            parameter.copy_(target)

    def shown(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of each parameter, masters included."""
        found = {}
        for parameter, target in self._targets.items():
            if target in self._inner.state:
                master = {} if target is parameter else {MASTER: target}
                found[parameter] = {**self._inner.state[target], **master}
        return found

    def restore(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Take over a saved state."""
        self._inner.state.clear()
        self._note()
        for parameter, found in states.items():
            target = self._targets[parameter]
            with torch.no_grad():
                if MASTER in found:
                    target.copy_(found[MASTER])
            self._inner.state[target] = {k: _copied(v, target) for k, v in found.items() if k != MASTER}


def _copied(value: Any, like: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(like.device, copy=True)
