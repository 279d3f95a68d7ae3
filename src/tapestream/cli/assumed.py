"""What an answer assumes of the machine, in words and as JSON."""

from typing import Any

from tapestream.cli import show
from tapestream.cli.hardware import Hardware
from tapestream.cli.machine import machine_document
from tapestream.costs.rates import usual_rates
from tapestream.ir.actions import Tier
from tapestream.units import format_nbytes, format_seconds


def speeds(hardware: Hardware, *, in_ram: bool = False) -> tuple[str, str]:
    """Of links, and of computing; ``in_ram``: of updates there, too."""
    links, cuda = hardware.machine.links, hardware.device == "cuda"
    low = Tier.HOST if cuda else Tier.DEVICE
    read, write = (show.rate(links[ends].bytes_per_second) for ends in ((Tier.DISK, low), (low, Tier.DISK)))
    up, down = (
        show.rate(links[ends].bytes_per_second) if cuda else ""
        for ends in ((Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST))
    )
    link = f"link {up if up == down else f'{up} in, {down} out'}, " if cuda else ""
    rates = hardware.machine.rates(usual_rates(hardware.device))
    peers = hardware.machine.peers
    between = "" if peers is None else f"other ranks {show.rate(peers.bytes_per_second)}, "
    computing = f"{show.flops(rates.flops_per_second)}, memory {show.rate(rates.memory_bytes_per_second)}"
    on_host = f", updates in RAM {rates.host_updates_per_second:.2g} parameters/s" if in_ram else ""
    return (
        f"{link}{between}disk {read} in, {write} out",
        f"{computing}, {format_seconds(rates.launch_seconds)} an operation{on_host}",
    )


def by_all(hardware: Hardware) -> str:
    """Whose the tokens are, where there are several ranks."""
    return "" if hardware.ranks.count == 1 else f" by {hardware.ranks}"


def room(hardware: Hardware) -> str:
    """RAM and disk, and whose they are."""
    ram, disk = hardware.ram, hardware.disk
    return f"RAM {format_nbytes(ram.nbytes)} ({ram.whose}), disk {format_nbytes(disk.nbytes)} ({disk.whose})"


def assumed_document(hardware: Hardware) -> dict[str, Any]:
    """All of it as JSON."""
    ram, disk = hardware.ram, hardware.disk
    return {
        "ram_nbytes": ram.nbytes, "ram_is": ram.whose, "disk_nbytes": disk.nbytes, "disk_is": disk.whose,
        **machine_document(hardware.machine),
    }  # fmt: skip
