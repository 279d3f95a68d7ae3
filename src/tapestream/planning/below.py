"""What lies below a machine's device."""

from tapestream.costs import Machine
from tapestream.ir import Tier


def has_lower_tier(machine: Machine | None) -> bool:
    """Whether there is anything, to go to and to come from."""
    links = machine.links if machine else {}
    return any((tier, Tier.DEVICE) in links and (Tier.DEVICE, tier) in links for tier in (Tier.HOST, Tier.DISK))


def disk_below(machine: Machine | None) -> bool:
    """Whether the host is above a disk."""
    links = machine.links if machine else {}
    return all(ends in links for ends in ((Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)))


def fastest_home(machine: Machine | None) -> Tier:
    """The tier that blocks come from soonest: the device itself where there is no other."""
    links = machine.links if machine else {}
    near = [tier for tier in (Tier.HOST, Tier.DISK) if (tier, Tier.DEVICE) in links]
    return near[0] if near else Tier.DEVICE
