"""`Outside`: updates of parameters outside the blocks, which are where they are: on the device, tables below it."""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from tapestream.optim.inner import Inner
from tapestream.optim.rule import MASTER


class Outside:
    """Steps of a torch optimizer on some parameters; those in ``masters`` (ids) are 16 bits wide, updated as fp32
    copies and rounded from them."""

    def __init__(
        self,
        inner: Inner,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[torch.Tensor],
        masters: Container[int],
    ) -> None:
        self._inner, self._masters = inner, masters
        self._targets: dict[torch.Tensor, torch.Tensor] = {}
        self._group_of: dict[torch.Tensor, int] = {}
        self._state: dict[torch.Tensor, Any] = {}
        self.add(groups, parameters)
        self._taken: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []  # gradients, and their versions

    def add(self, groups: Sequence[Mapping[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
        """Take over ``parameters``, which one of ``groups`` has got."""
        for p in parameters:
            if p not in self._targets:
                wide = id(p) in self._masters
                self._targets[p] = torch.nn.Parameter(p.detach().float().clone()) if wide else p
        self._group_of = {self._targets[p]: n for n, g in enumerate(groups) for p in g["params"] if p in self._targets}

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was updated."""
        return parameter in self._targets and self._targets[parameter] in self._state

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """One step with the hyperparameters of ``groups`` (schedulers change those of the outer optimizer)."""
        narrow = [p for p, target in self._targets.items() if target is p and p.grad is not None]
        for parameter, target in self._targets.items():  # one at a time: no plan has room for all wide gradients
            if target is not parameter and parameter.grad is not None:
                self._step_wide(groups, parameter, target)
        known = [p for p in narrow if p in self._state]
        self._step(groups, [p for p in known if p.device.type != "cpu"])
        self._step(groups, [p for p in known if p.device.type == "cpu"])
        for parameter in narrow:
            if parameter not in self._state:  # it makes state of its own, as that of blocks is made
                self._step(groups, [parameter])
        self._note()

    def _step(self, groups: Sequence[Mapping[str, Any]], targets: Iterable[torch.Tensor]) -> None:
        members: dict[int, list[Any]] = {}
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for target in targets:
            members.setdefault(self._group_of[target], []).append(target)
            if target in self._state:
                state[target] = self._state[target]
        below = any(p.device.type == "cpu" for targets in members.values() for p in targets)
        if members:  # torch makes sparse tensors on the default device, whatever they are made of
            with torch.device("cpu") if below else contextlib.nullcontext():
                self._inner.step(groups, members, state)
        self._state.update({target: state.get(target, {}) for targets in members.values() for target in targets})

    def _note(self) -> None:
        self._taken = [(p, weakref.ref(p.grad), p.grad._version) for p in self._targets if p.grad is not None]

    def has_taken(self) -> bool:
        """Whether a gradient of the last step, or from before a state was loaded, is still there as it was."""
        return any(p.grad is not None and p.grad is g() and p.grad._version == at for p, g, at in self._taken)

    def _step_wide(self, groups: Sequence[Mapping[str, Any]], parameter: torch.Tensor, target: torch.Tensor) -> None:
        assert parameter.grad is not None
        target.grad = parameter.grad.to(target.dtype)
        try:
            self._step(groups, [target])
        finally:
            target.grad = None
        with torch.no_grad():
            parameter.copy_(target)

    def shown(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of each parameter, masters included."""
        found = {}
        for parameter, target in self._targets.items():
            state = self._state.get(target)
            if state or (state is not None and target is not parameter):
                found[parameter] = {**state, **({} if target is parameter else {MASTER: target.detach()})}
        return found

    def restore(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Take over a saved state."""
        self._state.clear()
        self._note()
        for parameter, found in states.items():
            target = self._targets[parameter]
            with torch.no_grad():
                if MASTER in found:
                    target.copy_(found[MASTER])
            self._state[target] = {k: _copied(v, target) for k, v in found.items() if k != MASTER}


def _copied(value: Any, like: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(like.device, copy=True)
