"""Whether a step makes what one parameter gets of several parameters' numbers at once, as optimizers do that stack
matrices and multiply them as a batch. The kernels of other batches have other bits, which small tensors need not show.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tapestream.capture.cells import key_of
from tapestream.capture.observe import written_by
from tapestream.capture.rebinding import LeavesCompiled
from tapestream.runner.state import tensors_in

_ONE_BY_ONE = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
"""Operators that treat the tensors of their lists by themselves."""
_NONE = frozenset[int]()


class Across(LeavesCompiled):  # type: ignore[no-untyped-call]
    """Follows which parameters, by number, the bytes of each tensor come from, while steps run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, frozenset[int]] = {}
        self._held: list[torch.Tensor] = []  # so that nothing else comes to lie there

    def begin(self, number: int, tensors: Iterable[torch.Tensor | None]) -> None:
        """These are the parameter's own: it, and its gradient."""
        for tensor in tensors:
            if tensor is not None and (key := key_of(tensor)) is not None:
                self._held.append(tensor)
                self._sources.setdefault(key, frozenset({number}))

    def mixes(self, number: int, tensors: Iterable[Any]) -> bool:
        """Whether one of these, which are the parameter's, comes from another parameter."""
        return any(not self._of(tensor) <= {number} for tensor in tensors if isinstance(tensor, torch.Tensor))

    def _of(self, tensor: torch.Tensor) -> frozenset[int]:
        key = key_of(tensor)
        return _NONE if key is None else self._sources.get(key, _NONE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = [*args, *kwargs.values()], [result, *written_by(func, args, kwargs)]
        if func._schema.name.startswith(_ONE_BY_ONE):
            for inputs, outputs in _by_place(given, made):
                self._flows(inputs, outputs)
        else:
            self._flows(tensors_in(given), tensors_in(made))
        return result

    def _flows(self, inputs: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """What is ``made`` comes from all ``inputs`` now. Not from single numbers: what differs with these (norms,
        corrections) shows with small tensors, too."""
        sources = _NONE.union(*(self._of(tensor) for tensor in inputs if tensor.numel() > 1))
        for tensor in made:
            if (key := key_of(tensor)) is not None:
                self._held.append(tensor)
                self._sources[key] = self._of(tensor) | sources


def _by_place(given: list[Any], made: list[Any]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Of an operator that takes lists of tensors: what is given and made at each place. Tensors that are given beside
    the lists go to all."""
    lists, results = ([one for one in some if isinstance(one, list | tuple) and one] for some in (given, made))
    beside = [one for one in given if isinstance(one, torch.Tensor)]
    for place in range(max(map(len, lists), default=0)):
        yield [*_at(lists, place), *beside], _at(results, place)


def _at(lists: list[Any], place: int) -> list[torch.Tensor]:
    return [one[place] for one in lists if place < len(one) and isinstance(one[place], torch.Tensor)]
