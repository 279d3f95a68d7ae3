"""What is in flight, and the rules about it that every copy engine enforces."""

from collections.abc import Iterable
from time import perf_counter

from tapestream.errors import GradientError, InputError, StorageError
from tapestream.executor.engines.protocol import EngineStatistics, Lane, Ticket
from tapestream.storage import Region


class Flight:
    """The copies that were started and not waited for, and the counts of all copies."""

    def __init__(self) -> None:
        self._tickets: set[Ticket] = set()
        self._failed: dict[Ticket, str] = {}  # what storage said of them
        self._filled: dict[Region, Ticket] = {}
        self._read: dict[Region, int] = {}
        self._bytes_moved: dict[Lane, int] = {}
        self._copies = 0
        self._wait_seconds = 0.0

    def begin(self, source: Region, target: Region, nbytes: int | None) -> Ticket:
        """A ticket for a copy that may start now. Raises InputError or GradientError as `CopyEngine.copy` says."""
        nbytes = source.nbytes if nbytes is None else nbytes
        if not 0 <= nbytes <= min(source.nbytes, target.nbytes) or source is target:
            raise InputError(
                f"cannot copy {nbytes} bytes from {source} to {target}; "
                "both must hold at least that many bytes and be distinct"
            )
        self.check_arrived((source,))
        self.check_untouched(target)
        ticket = Ticket(source, target, nbytes, source.generation, target.generation)
        self._tickets.add(ticket)
        self._filled[target] = ticket
        self._read[source] = self._read.get(source, 0) + 1
        self._bytes_moved[ticket.lane] = self._bytes_moved.get(ticket.lane, 0) + nbytes
        self._copies += 1
        return ticket

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """The copy has come to nothing: whoever waits for it once more is told why, too."""
        if isinstance(error, StorageError):
            self._failed[ticket] = str(error)

    def end(self, ticket: Ticket) -> None:
        """The copy is being waited for. Raises GradientError for a void ticket or regions released meanwhile,
        StorageError for one that failed before."""
        if ticket not in self._tickets:
            if ticket in self._failed:
                raise StorageError(self._failed[ticket])
            raise GradientError(f"the copy {describe(ticket)} is not in flight: it was waited for before, or abandoned")
        self._tickets.remove(ticket)
        del self._filled[ticket.target]
        self._read[ticket.source] -= 1
        if self._read[ticket.source] == 0:
            del self._read[ticket.source]
        if ticket.source.generation != ticket.source_generation or ticket.target.generation != ticket.target_generation:
            raise GradientError(
                f"a region of the copy {describe(ticket)} was released while in flight; wait for the copy first"
            )

    def check_arrived(self, regions: Iterable[Region]) -> None:
        """Raises GradientError if a copy that nobody waited for fills one of the regions."""
        for region in regions:
            if region in self._filled:
                raise GradientError(
                    f"{region} would be used before the copy {describe(self._filled[region])} has arrived; "
                    "wait for the copy first"
                )

    def check_untouched(self, region: Region) -> None:
        """Raises GradientError if a copy that nobody waited for reads or fills the region."""
        self.check_arrived((region,))
        if region in self._read:
            raise GradientError(
                f"{region} would be released or overwritten while a copy still reads it; wait for the copy first"
            )

    def clear(self) -> list[Ticket]:
        """Void every ticket; returns those that were in flight."""
        tickets = list(self._tickets)
        self._tickets.clear()
        self._filled.clear()
        self._read.clear()
        return tickets

    def waited_since(self, start: float) -> None:
        """Count the time from ``start``, a reading of `time.perf_counter`, as time that a caller was blocked."""
        self._wait_seconds += perf_counter() - start

    def statistics(self) -> EngineStatistics:
        """See `CopyEngine.statistics`."""
        return EngineStatistics(dict(self._bytes_moved), self._copies, self._wait_seconds)


def describe(ticket: Ticket) -> str:
    """``DEVICE -> HOST of 4096 bytes``, for messages."""
    return f"{ticket.source.tier.name} -> {ticket.target.tier.name} of {ticket.nbytes} bytes"
