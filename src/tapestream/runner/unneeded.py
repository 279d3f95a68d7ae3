"""The end of a recompute: what follows its last saved tensor makes an output that nobody needs, and is left out.

The graph is recorded in full, since the cotangent enters at its end; only kernels are not run. (PyTorch's own
checkpointing stops its recompute at that point.)
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The mode costs tens of microseconds an operation, so it is on for the last saved tensors only; a little earlier, as
# an operation has begun before what it saves is seen.
_EARLIER = 4


class OutputNeeded(Exception):
    """What was to be left out is needed."""


@contextlib.contextmanager
def end_left_out(
    saved: int, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], device: torch.device
) -> Iterator["LeftOut"]:
    """Inside, saved tensors go through ``pack`` and ``unpack``; after number ``saved`` of them no kernel runs.

    Raises OutputNeeded when another tensor is saved then, a number taken out of one, something older written, or other
    hooks of the kind are in force (nested checkpointing keeps its arguments by itself).
    """
    count = 0

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        if count > saved:
            raise OutputNeeded
        if count == max(1, saved - _EARLIER):
            stack.enter_context(mode)
        mode.on = count == saved
        return pack(tensor)

    mode = _NoKernels(device, counted)
    with contextlib.ExitStack() as stack, saved_tensors_hooks(counted, unpack):
        yield mode.left_out


class LeftOut:
    """The memory of what was left out."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def check_dropped(self) -> None:
        """Raise OutputNeeded if something holds on to any of it: a hook's closure, an attribute, a list."""
        if not all(storage.expired() for storage in self.storages):  # type: ignore[no-untyped-call]
            raise OutputNeeded


class _NoKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While ``on``, operations give memory of the right shape and no numbers: NaN, so that a gradient in which they
    had a part would show it."""

    def __init__(self, device: torch.device, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on, self._device, self._pack = False, device, pack
        self.left_out = LeftOut()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if "device" in kwargs or not given or any(t.device.type != self._device.type for t in given):
            return func(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is not self._pack:
            raise OutputNeeded
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise OutputNeeded
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if any(alias.is_write for alias in aliases):
            if _reference(args[0]) not in self.left_out.storages:
                raise OutputNeeded
            return args[0]
        if aliases:  # a view costs nothing
            return func(*args, **kwargs)
        shapes, options = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, self._empty, func(*shapes, **options))

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
        self.left_out.storages.append(_reference(made))
        return made.fill_(float("nan")) if made.is_floating_point() or made.is_complex() else made.fill_(1)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
