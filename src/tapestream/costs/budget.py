"""`Budget`: bytes allowed in each tier."""

from tapestream.errors import InputError
from tapestream.ir.actions import Tier
from tapestream.units import format_nbytes, parse_nbytes


class Budget:
    """Bytes allowed in each tier; None means no limit there.

    ``Budget("8GiB")`` limits the device; ``Budget(device="8GiB", host="64GiB", disk=None)`` says each.
    """

    __slots__ = ("device_nbytes", "disk_nbytes", "host_nbytes")

    def __init__(
        self,
        device: "str | int | None" = None,
        *,
        host: str | int | None = None,
        disk: str | int | None = None,
    ) -> None:
        self.device_nbytes = None if device is None else parse_nbytes(device)
        self.host_nbytes = None if host is None else parse_nbytes(host)
        self.disk_nbytes = None if disk is None else parse_nbytes(disk)
        if self.device_nbytes == 0:
            raise InputError("a device budget of 0 bytes leaves no room for anything")

    @classmethod
    def of(cls, budget: "Budget | str | int | None") -> "Budget":
        """A Budget from whatever users write for one."""
        return budget if isinstance(budget, Budget) else cls(budget)

    def nbytes(self, tier: Tier) -> int | None:
        """Bytes allowed in ``tier``, None for no limit."""
        return (self.device_nbytes, self.host_nbytes, self.disk_nbytes)[tier]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budget) and all(self.nbytes(tier) == other.nbytes(tier) for tier in Tier)

    def __hash__(self) -> int:
        return hash(tuple(self.nbytes(tier) for tier in Tier))

    def __repr__(self) -> str:
        parts = (
            f"{tier.name.lower()}={'no limit' if nbytes is None else format_nbytes(nbytes)}"
            for tier in Tier
            if (nbytes := self.nbytes(tier)) is not None or tier is Tier.DEVICE
        )
        return f"Budget({', '.join(parts)})"
