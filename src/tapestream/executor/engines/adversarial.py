"""`adversarial`: the slowest copies that a schedule must survive. For tests and `verify`.

A copy happens only when it is waited for; until then its target holds NaN (all bits set: a NaN in every
IEEE type, -1 in signed integers), and so do released regions. A missing `Wait` or an early `Free` then shows as a NaN
or as a GradientError instead of as luck.
"""

import zlib
from collections.abc import Callable, Sequence

import torch

from tapestream.errors import GradientError, StorageError
from tapestream.executor.engines.flight import Flight, describe
from tapestream.executor.engines.protocol import EngineStatistics, Ticket
from tapestream.executor.engines.threads import transfer
from tapestream.storage import Region

POISON = 0xFF


class AdversarialEngine:
    """Copies happen at `wait`, on the calling thread; all that must not be read until then is poisoned."""

    name = "adversarial"

    def __init__(self) -> None:
        self._flight = Flight()
        self._checksums: dict[Ticket, int] = {}

    def copy(self, source: Region, target: Region, nbytes: int | None = None) -> Ticket:
        """See `CopyEngine.copy`; nothing is copied yet."""
        ticket = self._flight.begin(source, target, nbytes)
        poison(target, ticket.nbytes)
        self._checksums[ticket] = checksum(source, ticket.nbytes)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Copy now. Raises GradientError when the source was released, reused or overwritten since `copy`."""
        self._flight.end(ticket)
        try:
            if checksum(ticket.source, ticket.nbytes) != self._checksums.pop(ticket):
                raise GradientError(
                    f"the source of the copy {describe(ticket)} was overwritten while in flight; wait for it first"
                )
            transfer(ticket.source, ticket.target, ticket.nbytes)
        except StorageError as error:
            self._flight.failed(ticket, error)
            raise

    def compute_begins(self, regions: Sequence[Region]) -> None:
        """See `CopyEngine.compute_begins`."""
        self._flight.check_arrived(regions)

    def compute_ended(self, regions: Sequence[Region]) -> None:
        """Nothing to do: an overwritten source is found at `wait`."""

    def hand_over(self, regions: Sequence[Region]) -> None:
        """Nothing to do: a copy is over when `wait` returns."""

    def on_host(self, regions: Sequence[Region]) -> Callable[[], None]:
        """See `CopyEngine.on_host`: what `wait` has returned for is over."""
        self.compute_begins(regions)
        return lambda: None

    def release(self, region: Region) -> None:
        """Poison the region. Raises GradientError while a copy uses it."""
        self._flight.check_untouched(region)
        poison(region, region.nbytes)

    def abandon(self) -> None:
        """Drop every copy; their targets stay poisoned."""
        self._flight.clear()
        self._checksums.clear()

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self.abandon()

    def statistics(self) -> EngineStatistics:
        """See `CopyEngine.statistics`."""
        return self._flight.statistics()


def poison(region: Region, nbytes: int) -> None:
    """Set every bit of the first ``nbytes`` bytes."""
    if region.extent is not None:
        region.extent.write_from(torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu"))
    else:
        region.memory[:nbytes].fill_(POISON)


def checksum(region: Region, nbytes: int) -> int:
    """A number that changes, but for one chance in 2**32, when the first ``nbytes`` bytes do."""
    if region.extent is None:
        memory = region.memory[:nbytes].cpu()
    else:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        region.extent.read_into(memory)
    return zlib.crc32(memory.numpy().data)
