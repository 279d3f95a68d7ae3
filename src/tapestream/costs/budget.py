"""`Budget`: bytes allowed in each tier."""

from tapestream.errors import InputError
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.units import format_nbytes, parse_nbytes


class Budget:
    """Bytes allowed in each tier. None means no limit there.

    ``Budget("8GiB")`` limits the device; ``Budget(device="8GiB", host="64GiB", disk=None)`` gives each. ``calls``: the
    largest number of live calls (whose backward has not run yet) of one model, chain, loop or program at once. It is
    two for a loss of two forwards: of preferences, of pairs, of two dropouts of one batch. Each call is then planned so
    that all of them fit; otherwise the first takes what there is.
    """

    __slots__ = ("calls", "device_nbytes", "disk_nbytes", "host_nbytes")

    def __init__(
        self,
        device: "str | int | None" = None,
        *,
        host: str | int | None = None,
        disk: str | int | None = None,
        calls: int = 1,
    ) -> None:
        self.device_nbytes = None if device is None else parse_nbytes(device)
        self.host_nbytes = None if host is None else parse_nbytes(host)
        self.disk_nbytes = None if disk is None else parse_nbytes(disk)
        if self.device_nbytes == 0:
            raise InputError("a device budget of 0 bytes leaves no room for anything")
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise InputError(
                f"Budget(calls={calls!r}): the number of calls that await their backward at once must be 1 or more"
            )
        self.calls = calls

    @classmethod
    def of(cls, budget: "Budget | str | int | None") -> "Budget":
        """A Budget from whatever users write for one."""
        return budget if isinstance(budget, Budget) else cls(budget)

    def nbytes(self, tier: Tier) -> int | None:
        """Bytes allowed in ``tier``, None for no limit. (Shards on the device are in the device's.)"""
        return (self.device_nbytes, None, self.host_nbytes, self.disk_nbytes)[tier]

    def with_device(self, nbytes: int | None) -> "Budget":
        """The same with ``nbytes`` bytes of device, None for no limit."""
        return Budget(nbytes, host=self.host_nbytes, disk=self.disk_nbytes, calls=self.calls)

    def _key(self) -> tuple[int | None, ...]:
        return (*map(self.nbytes, MEMORIES), self.calls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budget) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = [
            f"{tier.name.lower()}={'no limit' if nbytes is None else format_nbytes(nbytes)}"
            for tier in MEMORIES
            if (nbytes := self.nbytes(tier)) is not None or tier is Tier.DEVICE
        ]
        parts += [f"calls={self.calls}"] if self.calls > 1 else []
        return f"Budget({', '.join(parts)})"
