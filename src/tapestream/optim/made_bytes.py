"""`MadeBytes`: how much a rule makes, by the operations that it calls; of tensors without bytes, too."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MadeBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``peak_nbytes``: the most bytes at once of storages that operations inside have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_nbytes = 0
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count what is new."""
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self._now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self._now += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._now)
