"""`StateInParts`: what ``optimizer.state`` shows of a parameter whose state lies in several places."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.storage.layout import in_memory_order

Places = Callable[[], Sequence[tuple[slice, torch.Tensor]]]
"""Where the state lies now: ranges of its elements, in memory order, and the bytes of each; of all, of its shape."""


class StateInParts(torch.Tensor):
    """One tensor of state, of which each part may lie in another place and another tier.

    It takes no bytes. Whatever reads it is given the whole, put together from the parts as they are now; what an
    operation writes into it, or into a view of it, goes to the parts. Pickles and copies are ordinary tensors.
    """

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    whole_in: Callable[[torch.Tensor], torch.Tensor]  # the whole, made in a tensor of one dimension
    pieces: Callable[[], list[torch.Tensor]] | None = None  # that follow each other, if it lies in row-major order

    @staticmethod
    def over(
        shape: torch.Size, stride: Sequence[int], dtype: torch.dtype, places: Places,
        complete: Callable[[torch.Tensor], None] | None = None,
    ) -> "StateInParts":  # fmt: skip
        """The tensor of this shape whose elements lie at ``places``; ``stride``: of a dense tensor in that order.
        ``complete``: brings those that lie in other processes to where there are zeros."""

        def whole_in(flat: torch.Tensor) -> torch.Tensor:
            if complete is not None:
                flat.zero_()
            for where, view in places():
                flat[where].copy_(view if view.dim() == 1 else in_memory_order(view, stride))
            if complete is not None:
                complete(flat)
            return flat.as_strided(shape, stride)

        def write(value: torch.Tensor) -> None:
            flat = in_memory_order(value, stride)
            for where, view in places():
                view.copy_(flat[where] if view.dim() == 1 else flat[where].as_strided(shape, stride))

        made = _made(shape, dtype, lambda: whole_in(torch.empty(shape.numel(), dtype=dtype, device="cpu")), write)
        made.whole_in = whole_in
        if complete is not None:
            made.pieces = lambda: [made.read().contiguous()]
        elif tuple(stride) == made.stride():
            made.pieces = lambda: [view for _, view in places()]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on the wholes, then write those back that it has changed."""
        kwargs = kwargs or {}
        wholes: dict[int, torch.Tensor] = {}

        def opened(value: Any) -> Any:
            if not isinstance(value, StateInParts):
                return value
            if id(value) not in wholes:
                wholes[id(value)] = value.read()
            return wholes[id(value)]

        result = func(*pytree.tree_map(opened, args), **pytree.tree_map(opened, kwargs))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        by_result: dict[int, StateInParts] = {}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for value in pytree.tree_leaves(given.get(argument.name)):
                    if isinstance(value, StateInParts):
                        value.write(wholes[id(value)])
                        by_result[id(wholes[id(value)])] = value
        if by_result:
            return pytree.tree_map(lambda value: by_result.get(id(value), value), result)
        if args and isinstance(args[0], StateInParts) and _is_view(func):
            if isinstance(result, torch.Tensor):
                return _view_of(args[0], result, lambda whole: func(whole, *args[1:], **kwargs))
            pieces = [
                _view_of(args[0], view, lambda whole, i=i: func(whole, *args[1:], **kwargs)[i])  # type: ignore[misc]
                for i, view in enumerate(result)
            ]
            return pieces if isinstance(result, list) else tuple(pieces)
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StateInParts({self.read()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _: Any) -> torch.Tensor:
        return self.read()

    def numpy(self, *, force: bool = False) -> Any:
        """Of the whole; a copy."""
        return self.read().numpy(force=force)

    def tolist(self) -> Any:
        """Of the whole."""
        return self.read().tolist()


def read_when_asked(shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> StateInParts:
    """A tensor that ``read()`` gives whenever it is read, and nobody writes into."""

    def whole_in(flat: torch.Tensor) -> torch.Tensor:
        found = read()
        return flat.view(found.shape).copy_(found)

    def write(_: torch.Tensor) -> None:
        raise InputError("a tensor that is divided among ranks can be read here, and not be written into")

    made = _made(shape, dtype, read, write)
    made.whole_in, made.pieces = whole_in, lambda: [read().contiguous()]
    return made


def _made(
    shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]
) -> StateInParts:
    made: StateInParts = torch.Tensor._make_wrapper_subclass(StateInParts, shape, dtype=dtype)
    made.read, made.write = read, write
    return made


def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def _view_of(base: StateInParts, view: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> StateInParts:
    """A view of ``base`` that stays true; ``cut`` makes it of the whole."""

    def write(value: torch.Tensor) -> None:
        whole = base.read()
        cut(whole).copy_(value)
        base.write(whole)

    return _made(view.shape, view.dtype, lambda: cut(base.read()), write)
