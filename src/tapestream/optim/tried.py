"""`Tried`: what an optimizer does with a parameter of a group, found by trying it once for each kind of them."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from tapestream.errors import InputError
from tapestream.optim.common import Way
from tapestream.optim.rule import MASTER
from tapestream.optim.small_groups import SmallGroup, small_group, stand_ins
from tapestream.optim.speed import bytes_per_second
from tapestream.optim.state import OptimizerClass, StateShape, is_elementwise, probe
from tapestream.optim.trial import way_of

Group: TypeAlias = dict[str, Any]


class Tried:
    """``groups()`` gives the param_groups as they are now; ``masters``: ids of parameters updated as fp32 copies.
    ``elsewhere``: of updates on another device, the groups as those see them, and that device."""

    def __init__(
        self,
        cls: OptimizerClass,
        options: Mapping[str, Any],
        groups: Callable[[], Sequence[Group]],
        masters: Container[int],
        device: torch.device,
        elsewhere: tuple[Callable[[Group], Group], torch.device] | None = None,
    ) -> None:
        self._cls, self._groups, self._masters, self._device = cls, groups, masters, device
        self._elsewhere = elsewhere
        self._options = options
        self._required = {k: v for k, v in options.items() if k not in ("fused", "foreach")}
        self._way: Way | None = None
        self._small: dict[int, list[torch.Tensor]] = {}
        self._shapes: dict[object, StateShape] = {}
        self._elementwise: dict[object, bool] = {}
        self._speeds: dict[object, float | None] = {}

    def way(self) -> Way:
        """How steps are taken part by part. Raises InputError for an optimizer that looks across tensors."""
        if self._way is None:
            groups = [self._small_group(group) for group in self._groups()]
            self._way = way_of(self._cls, self._options, groups, self._device)
        return self._way

    def again(self) -> Way:
        """The same for groups that are others now."""
        self._way = None
        self._small.clear()
        return self.way()

    def stand_ins(self, number: int) -> list[torch.Tensor]:
        """Small tensors without gradients that stand for those of a group."""
        if number not in self._small:
            self._small[number] = stand_ins(self._small_group(self._groups()[number]), self._device)
        return self._small[number]

    def check_closure(self) -> None:
        """Raise InputError for an optimizer that calls the closure of its step several times."""
        calls = self.way().closure_calls
        if calls > 1:
            raise InputError(
                f"{self._cls.__name__}.step(closure) calls its closure {calls} times, with all parameters changed at "
                "once; the blocks of a streamed model are updated one after the other: call backward() and then "
                "step() without a closure, or use another optimizer"
            )

    def _small_group(self, group: Group) -> SmallGroup:
        trained = [p for p in group["params"] if p.requires_grad]
        trained = trained or [p for p in group["params"] if p.is_floating_point() and p.itemsize > 1]  # may be thawed
        return small_group(_plain(group), [(tuple(p.shape), self.target_dtype(p)) for p in trained])

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
            ways = [(group, self._device)]
            if self._elsewhere is not None:
                shown, device = self._elsewhere
                ways.append((shown(group), device))
            self._elementwise[key] = all(
                is_elementwise(self._cls, _plain(one), self._required, dtype, device) for one, device in ways
            )
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
