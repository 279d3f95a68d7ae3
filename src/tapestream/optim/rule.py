"""`Rule`: applies a torch optimizer to blocks, their state in the bytes that the schedule has brought."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tapestream.optim.state import OptimizerClass
from tapestream.storage.blocks import ParameterBlock

Groups: TypeAlias = Callable[[], Sequence[Mapping[str, Any]]]
Work: TypeAlias = Sequence[tuple[ParameterBlock, Mapping[int, torch.Tensor], Sequence[torch.Tensor]]]
"""Blocks, their gradients by parameter number, and the views of their state in the order of ``state_slots``."""
MASTER = "master"


@dataclass(slots=True)
class _Entry:
    """One parameter to be updated: ``target`` is what the optimizer sees, ``states`` has the places of its state."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]
    target: torch.Tensor | None = None


class Rule:
    """The optimizer's rule for every block.

    ``groups()`` gives the param_groups as they are now, so that learning-rate schedulers work. 16-bit parameters in
    ``masters`` (ids) are updated through an fp32 copy that lies beside their state.
    """

    def __init__(
        self, cls: OptimizerClass, options: Mapping[str, Any], groups: Groups, masters: frozenset[int]
    ) -> None:
        self._cls, self._options, self._groups, self._masters = cls, options, groups, masters
        self.scalars: dict[int, dict[str, Any]] = {}  # per parameter id: what is not streamed (Adam's step)
        self._created: set[int] = set()
        self._group_of: dict[int, int] = {}
        self._inner: torch.optim.Optimizer | None = None  # made once: its constructor takes longer than a small step

    def run(self, work: Work) -> None:
        """Update the parameters that are the optimizer's and have a gradient, in place, and their state in its
        views."""
        if not self._group_of:  # groups never lose or gain parameters
            self._group_of.update({id(p): g for g, group in enumerate(self._groups()) for p in group["params"]})
        for part in [work] if self._tensor_by_tensor(work) else [[block] for block in work]:
            entries = [entry for block in part for entry in self._entries(*block)]
            self._step([entry for entry in entries if id(entry.parameter) in self._created])
            for entry in entries:
                # The first step makes the state itself; one tensor at a time, so that only one is held twice.
                if id(entry.parameter) not in self._created:
                    self._step([entry])

    def restored(self, parameter: torch.Tensor, scalars: dict[str, Any]) -> None:
        """A saved state was written to the parameter's home."""
        self._created.add(id(parameter))
        self.scalars[id(parameter)] = scalars

    def forget(self) -> None:
        """Nothing has been updated yet."""
        self._created.clear()
        self.scalars.clear()

    def _tensor_by_tensor(self, work: Work) -> bool:
        """Whether the optimizer's temporaries are those of one tensor, be there many or few: not in its foreach form,
        which is the default on a GPU."""
        on_cpu = all(gradient.is_cpu for _, gradients, _ in work for gradient in gradients.values())
        return all(group.get("fused") or (on_cpu and not group.get("foreach")) for group in self._groups())

    def _entries(
        self, block: ParameterBlock, gradients: Mapping[int, torch.Tensor], views: Sequence[torch.Tensor]
    ) -> list[_Entry]:
        found = {
            i: _Entry(block.parameters[i], gradient, {})
            for i, gradient in gradients.items()
            if id(block.parameters[i]) in self._group_of
        }
        for (i, name), view in zip(block.state_slots, views, strict=True):
            if i in found:
                found[i].states[name] = view
        return list(found.values())

    @torch.no_grad()
    def _step(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        try:
            for entry in entries:
                self._aim(entry)
            self._optimize(entries)
        finally:
            for entry in entries:
                if entry.target is not None:
                    entry.target.grad = None
        for entry in entries:
            if id(entry.parameter) in self._masters:
                assert entry.target is not None
                entry.parameter.copy_(entry.target)
            self._created.add(id(entry.parameter))

    def _aim(self, entry: _Entry) -> None:
        """What the optimizer is to see: the parameter's bytes, or its master, with the gradient."""
        parameter, gradient = entry.parameter, entry.gradient
        # Another tensor over the same bytes: the parameter's own .grad, which may lie on another device, is left alone.
        target = parameter.detach()
        if id(parameter) in self._masters:
            target = entry.states[MASTER]
            if id(parameter) not in self._created:
                target.copy_(parameter)
            gradient = gradient.to(target.dtype)
        target.grad = gradient
        entry.target = target

    def _optimize(self, entries: Sequence[_Entry]) -> None:
        members: dict[int, list[torch.Tensor | None]] = {}
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for entry in entries:
            key = id(entry.parameter)
            members.setdefault(self._group_of[key], []).append(entry.target)
            if key in self._created:
                streamed = {k: v for k, v in entry.states.items() if k != MASTER}
                assert entry.target is not None
                state[entry.target] = {**self.scalars[key], **streamed}
        groups = self._groups()
        chosen = [{**groups[g], "params": targets} for g, targets in sorted(members.items())]
        inner = self._inner
        if inner is None:
            inner = self._inner = self._cls(chosen, **self._options)
        inner.param_groups, inner.state = chosen, state
        try:
            with torch.enable_grad():
                inner.step()
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)
        for entry in entries:
            assert entry.target is not None
            self._put_away(entry, state.get(entry.target, {}))

    def _put_away(self, entry: _Entry, made: Mapping[str, Any]) -> None:
        """State that the optimizer made goes to its places; the rest are scalars."""
        scalars = {}
        for name, value in made.items():
            view = entry.states.get(name)
            if view is None:
                scalars[name] = value
            elif value is not view and value.data_ptr() != view.data_ptr():
                view.copy_(value)
        known = self.scalars.get(id(entry.parameter))
        if known is None or known.keys() != scalars.keys() or any(known[k] is not v for k, v in scalars.items()):
            self.scalars[id(entry.parameter)] = scalars  # otherwise the same object shows that nothing is new
