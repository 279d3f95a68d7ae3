"""`Tried`: what an optimizer does with a parameter of a group, found by trying it once for each kind of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from tapestream.optim.rule import MASTER
from tapestream.optim.speed import bytes_per_second
from tapestream.optim.state import OptimizerClass, StateShape, is_elementwise, probe

Group: TypeAlias = dict[str, Any]


class Tried:
    """``groups()`` gives the param_groups as they are now; ``masters``: ids of parameters updated as fp32 copies."""

    def __init__(
        self,
        cls: OptimizerClass,
        options: Mapping[str, Any],
        groups: Callable[[], Sequence[Group]],
        masters: frozenset[int],
        device: torch.device,
    ) -> None:
        self._cls, self._groups, self._masters, self._device = cls, groups, masters, device
        self._required = {k: v for k, v in options.items() if k not in ("fused", "foreach")}
        self._shapes: dict[object, StateShape] = {}
        self._elementwise: dict[object, bool] = {}
        self._speeds: dict[object, float | None] = {}

    def shape(self, parameter: torch.Tensor) -> StateShape:
        """The state that the parameter has or will have, its fp32 master included."""
        group, dtype = self.group_of(parameter), self.target_dtype(parameter)
        key = (parameter.shape, dtype, id(group))
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = probe(self._cls, _plain(group), self._required, parameter.shape, dtype)
        if id(parameter) in self._masters:
            found = replace(found, tensors=(*found.tensors, (MASTER, tuple(parameter.shape), torch.float32)))
        return found

    def may_be_cut(self, parameter: torch.Tensor) -> bool:
        """Whether its elements may be updated apart from each other."""
        if any(shape != tuple(parameter.shape) for _, shape, _ in self.shape(parameter).tensors):
            return False
        group, dtype = self.group_of(parameter), self.target_dtype(parameter)
        key = (dtype, id(group))
        if key not in self._elementwise:
            found = is_elementwise(self._cls, _plain(group), self._required, dtype, self._device)
            self._elementwise[key] = found
        return self._elementwise[key]

    def bytes_per_second(self, parameter: torch.Tensor) -> float | None:
        """What updates of such parameters read and write; None where that cannot be tried."""
        group, dtype = self.group_of(parameter), self.target_dtype(parameter)
        key = (parameter.numel(), dtype, id(group))
        if key not in self._speeds:
            found = bytes_per_second(self._cls, _plain(group), self._required, parameter.numel(), dtype, self._device)
            self._speeds[key] = found
        return self._speeds[key]

    def group_of(self, parameter: torch.Tensor) -> Group:
        """The parameter's group."""
        return next(g for g in self._groups() if any(parameter is p for p in g["params"]))

    def target_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Of what the optimizer sees: the parameter, or its master."""
        return torch.float32 if id(parameter) in self._masters else parameter.dtype


def _plain(group: Group) -> dict[str, Any]:
    """A group's options without its parameters."""
    return {k: v for k, v in group.items() if k != "params"}
