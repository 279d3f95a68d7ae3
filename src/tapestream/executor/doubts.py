"""`Doubts`: whether a block that was lent has written into its parameters, answered without waiting for the device.

A write by way of ``p.data`` changes no version. Where the device would have to be waited for to see one, the question
is asked on the device and answered when that has got there: what was written is lost by then, but never silently.
"""

from dataclasses import dataclass, field

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.streams import current_stream, event_after
from tapestream.errors import GradientError
from tapestream.executor.loans import Look

_MOST = 8  # calls that have not been answered; more of them, and the oldest is waited for


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    names: list[str]
    answers: torch.Tensor  # page-locked, one flag for each name
    event: torch.Event


@dataclass(slots=True, eq=False)
class Doubts:
    """Of the calls without gradients of one model. ``writers``: blocks that were seen to write in a watched call."""

    device: torch.device
    writers: set[int] = field(default_factory=set)
    _open: dict[str, torch.Tensor] = field(default_factory=dict)
    _asked: list[_Asked] = field(default_factory=list)

    def has_written(self, block: int, name: str, before: Look, after: Look, *, watched: bool) -> bool:
        """Whether the block's parameters are to be copied home. ``watched``: the device may be waited for."""
        if block in self.writers or before.versions != after.versions:
            return True
        if watched or not is_accelerator(self.device):
            differs = before.differs(after)
            if differs:
                self.writers.add(block)
            return differs
        pairs = zip(before.sums, after.sums, strict=True)
        self._open[name] = torch.stack([one.ne(other) for one, other in pairs]).any()
        return False

    def call_ended(self) -> None:
        """Send the questions of a call; look at the answers to earlier ones that are there."""
        if self._open:
            flags = torch.stack(list(self._open.values()))
            answers = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True, device="cpu")
            answers.copy_(flags, non_blocking=True)
            self._asked.append(_Asked([*self._open], answers, event_after(current_stream(self.device))))
            self._open.clear()
        while self._asked and (len(self._asked) > _MOST or self._asked[0].event.query()):
            self._answer(self._asked.pop(0))

    def settle(self) -> None:
        """Wait for all answers. Raises GradientError where something was written, as `call_ended` does."""
        while self._asked:
            self._answer(self._asked.pop(0))

    def _answer(self, asked: _Asked) -> None:
        asked.event.synchronize()
        written = [name for name, flag in zip(asked.names, asked.answers.tolist(), strict=True) if flag]
        if written:
            raise GradientError(
                f"{written[0]} wrote into its parameters through .data in a call without gradients, but not in the "
                "first such call. The write was not copied home and is lost; write into the parameter itself "
                "(p.copy_(..) under torch.no_grad()), or outside of the model"
            )
