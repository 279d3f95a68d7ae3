"""A function mode that sees what runs between the blocks of a call, and nothing inside of them."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

from torch.overrides import TorchFunctionMode, _get_current_function_mode

_DERIVED = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # attributes that are functions of the tensor
# What asks about the graph of the tensor itself.
_ITS_OWN = frozenset(
    ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_",
     "detach_", "__set__", "__delete__", "__deepcopy__", "__reduce_ex__")
)  # fmt: skip


def is_about_itself(func: Any) -> bool:
    """Whether a function asks its tensor about itself, and makes nothing of its numbers."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _DERIVED
    return name in _ITS_OWN


class BetweenBlocks(TorchFunctionMode):
    """Entered where a call begins and after each block, left before each block. Where the caller is inside a mode of
    its own by then it cannot be left, and is ``asleep``."""

    only_watches = True  # it is none of the user's, which a recompute enters again

    def __init__(self) -> None:
        super().__init__()
        self.asleep = self.entered = False

    def __enter__(self) -> Self:
        if not self.entered:
            super().__enter__()  # type: ignore[no-untyped-call]
        self.asleep, self.entered = False, True
        return self

    def __exit__(self, *raised: Any) -> None:
        now = _get_current_function_mode()  # type: ignore[no-untyped-call]
        self.asleep = self.entered and now is not self
        if now is self:
            self.entered = False
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A block runs inside, and what follows is seen."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @contextlib.contextmanager
    def until(self, *, begins: bool = False) -> Iterator[None]:
        """A call runs inside. ``begins``: what is before its first block is seen, too."""
        try:
            if begins:
                self.__enter__()
            yield
        finally:
            self.__exit__(None, None, None)
