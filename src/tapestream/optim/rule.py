"""`Rule`: applies a torch optimizer to one block, its state in the bytes that the schedule has brought."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tapestream.optim.state import OptimizerClass
from tapestream.storage.blocks import ParameterBlock

Groups = Callable[[], Sequence[Mapping[str, Any]]]
MASTER = "master"


class Rule:
    """The optimizer's rule for every block.

    ``groups()`` gives the param_groups as they are now, so that learning-rate schedulers work. 16-bit parameters in
    ``masters``
    (ids) are updated through an fp32 copy that lies beside their state.
    """

    def __init__(
        self, cls: OptimizerClass, options: Mapping[str, Any], groups: Groups, masters: frozenset[int]
    ) -> None:
        self._cls, self._options, self._groups, self._masters = cls, options, groups, masters
        self.scalars: dict[int, dict[str, Any]] = {}  # per parameter id: what is not streamed (Adam's step)
        self._created: set[int] = set()
        self._known: set[int] = set()

    def run(self, block: ParameterBlock, gradients: Mapping[int, torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        """Update the block's parameters that are the optimizer's and have a gradient, in place, and their state in
        ``views``."""
        if not self._known:  # groups never lose or gain parameters
            self._known.update(id(p) for group in self._groups() for p in group["params"])
        gradients = {i: g for i, g in gradients.items() if id(block.parameters[i]) in self._known}
        states: dict[int, dict[str, torch.Tensor]] = {i: {} for i in gradients}
        for (i, name), view in zip(block.state_slots, views, strict=True):
            if i in states:
                states[i][name] = view
        old = [i for i in gradients if id(block.parameters[i]) in self._created]
        self._step(block, old, gradients, states)
        for i in gradients:
            # The first step makes the state itself; one tensor at a time, so that only one is held twice.
            if id(block.parameters[i]) not in self._created:
                self._step(block, [i], gradients, states)

    def restored(self, parameter: torch.Tensor, scalars: dict[str, Any]) -> None:
        """A saved state was written to the parameter's home."""
        self._created.add(id(parameter))
        self.scalars[id(parameter)] = scalars

    def forget(self) -> None:
        """Nothing has been updated yet."""
        self._created.clear()
        self.scalars.clear()

    @torch.no_grad()
    def _step(
        self,
        block: ParameterBlock,
        numbers: Sequence[int],
        gradients: Mapping[int, torch.Tensor],
        states: Mapping[int, dict[str, torch.Tensor]],
    ) -> None:
        if not numbers:
            return
        targets: dict[int, torch.Tensor] = {}
        for i in numbers:
            parameter, gradient = block.parameters[i], gradients[i]
            # Another tensor over the same bytes: the parameter's own .grad, which may lie on another device, is left
            # alone.
            target = parameter.detach()
            if id(parameter) in self._masters:
                target = states[i][MASTER]
                if id(parameter) not in self._created:
                    target.copy_(parameter)
                gradient = gradient.to(target.dtype)
            target.grad = gradient
            targets[i] = target
        try:
            self._optimize(block, numbers, targets, states)
        finally:
            for target in targets.values():
                target.grad = None
        for i in numbers:
            if id(block.parameters[i]) in self._masters:
                block.parameters[i].copy_(targets[i])
            self._created.add(id(block.parameters[i]))

    def _optimize(
        self,
        block: ParameterBlock,
        numbers: Sequence[int],
        targets: Mapping[int, torch.Tensor],
        states: Mapping[int, dict[str, torch.Tensor]],
    ) -> None:
        by_id = {id(block.parameters[i]): i for i in numbers}
        groups = []
        for group in self._groups():
            mine = [by_id[id(p)] for p in group["params"] if id(p) in by_id]
            if mine:
                groups.append({**group, "params": [targets[i] for i in mine]})
        inner = self._cls(groups, **self._options)
        for i in numbers:
            key = id(block.parameters[i])
            if key in self._created:
                streamed = {k: v for k, v in states[i].items() if k != MASTER}
                inner.state[targets[i]] = {**self.scalars[key], **streamed}
        with torch.enable_grad():
            inner.step()
        for i in numbers:
            made = inner.state.get(targets[i], {})
            scalars = {}
            for name, value in made.items():
                view = states[i].get(name)
                if view is None:
                    scalars[name] = value
                elif value.data_ptr() != view.data_ptr():
                    view.copy_(value)
            self.scalars[id(block.parameters[i])] = scalars
