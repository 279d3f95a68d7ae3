"""Leaves that stand in for other tensors while a step is recorded, wherever the step gets those from."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tapestream.executor.loop.traits import StepTraits
from tapestream.runner.guards import check_asked


class StandIns:
    """By id of a tensor, its stand-in.

    A tensor computed before the loop has a graph; gradients must stop at the tensor, since what made it runs backward
    once, when all steps are done. Asking autograd to stop there fails where another tensor asked for lies behind it.
    """

    def __init__(self, by_id: dict[int, torch.Tensor]) -> None:
        self._by_id = by_id
        self._mode = _Replacing(by_id) if by_id else None

    @classmethod
    def of(cls, traits: StepTraits) -> "StandIns":
        """Stand-ins for one call."""
        found = {}
        for place, dtype in traits.stand_ins:
            original = traits.leaves[place]
            found[id(original)] = original.detach().to(dtype).requires_grad_()
        return cls(found)

    def standing_in(self) -> contextlib.AbstractContextManager[object]:
        """Inside, operations see the stand-ins."""
        return contextlib.nullcontext() if self._mode is None else self._mode

    def targets(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """``leaves``, or what stands in for them."""
        return tuple(self._by_id.get(id(leaf), leaf) for leaf in leaves)

    def originals_out(self, leaves: Sequence[Any]) -> list[Any]:
        """``leaves`` of a result, in which a tensor may stand that no operation has touched."""
        return [self._by_id.get(id(leaf), leaf) for leaf in leaves] if self._by_id else list(leaves)


class Seen(TorchFunctionMode):
    """Notes every tensor that operations are given and whose graph is older than ``since`` (a sequence number).
    ``inputs``: ids of the step's, of which it may not ask everything (see `check_asked`)."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since, self.inputs = since, frozenset[int]()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_asked(func, args, self.inputs, "a step of the loop")
        for tensor in _tensors((args, kwargs or {})):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < self.since:
                self.tensors.append(tensor)
        return func(*args, **(kwargs or {}))


class _Replacing(TorchFunctionMode):
    def __init__(self, by_id: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._get: Callable[[int, Any], Any] = by_id.get

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        get = self._get
        args = tuple([get(id(a), a) if type(a) not in (tuple, list) else self._within(a) for a in args])
        if kwargs:
            kwargs = {name: self._within(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        return func(*args)

    def _within(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)([self._within(item) for item in value])
        return self._get(id(value), value)


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    waiting = list(arguments)
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
