"""`Snapshot`: what was there before a computation first ran."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tapestream.capture.buffers import BufferSnapshot, buffer_slots
from tapestream.capture.observe import Observation


@dataclass(slots=True)
class Snapshot:
    """Buffers and numbers of known modules; and, with each ``observation`` of a run that is added, what that run was
    seen to write into and draw from besides."""

    buffers: BufferSnapshot
    observations: list[Observation] = field(default_factory=list)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "Snapshot":
        """As it is now."""
        return cls(BufferSnapshot.take(buffer_slots(modules)))

    def put_back(self) -> None:
        """Let it be there again."""
        for observation in reversed(self.observations):
            observation.put_back()
        self.buffers.put_back()
