"""A function mode that sees what runs between the blocks of a call, and nothing inside of them."""

from typing import Any, Self

from torch.overrides import TorchFunctionMode, _get_current_function_mode


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
