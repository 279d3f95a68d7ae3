"""``tapestream machine``: how fast bytes move between tiers here, measured."""

import shutil
import tempfile
from pathlib import Path

import psutil

from tapestream.cli import machine_file, show
from tapestream.cli.chosen import chosen_device
from tapestream.costs import Machine
from tapestream.costs.rates import usual_rates
from tapestream.ir.actions import Tier
from tapestream.planning.measure import measure_machine
from tapestream.units import format_nbytes, format_seconds


def measured(device: str, folder: Path | None, save: Path | None, json_: bool) -> None:
    """Measure, tell, and write into ``save``."""
    chosen = chosen_device(device)
    found = measure_machine(chosen, folder)
    if save is not None:
        ram, disk = psutil.virtual_memory().total, shutil.disk_usage(folder or tempfile.gettempdir()).free
        machine_file.save(save, machine_file.MeasuredMachine(chosen, found, ram, disk))
    if json_:
        show.as_json({"device": chosen, **machine_document(found)})
        return
    rows = [
        (
            f"{name(source, chosen)} to {name(target, chosen)}",
            show.rate(link.bytes_per_second),
            show.rate(link.mixed),
            format_seconds(link.latency_seconds),
            format_seconds(link.busy_seconds),
        )
        for (source, target), link in found.links.items()
    ]
    show.table(found.name or chosen, rows, ("link", "alone", "both ways at once", "latency", "starting one"))
    rates = found.rates(usual_rates(chosen))
    show.line(f"float32 matrix products: {show.flops(rates.flops_per_second)}")
    show.line(f"elementwise operations: {show.rate(rates.memory_bytes_per_second)} of memory read and written")
    show.line(f"starting an operation: {format_seconds(rates.launch_seconds)}")
    if found.host_updates_per_second is not None:
        show.line(f"updates in RAM, of AdamW: {rates.host_updates_per_second:.2g} parameters a second")
    if save is not None:
        room = f"RAM {format_nbytes(ram)}, disk {format_nbytes(disk)} free"
        show.line(f"Written: {save}, with {room}; tapestream plan --machine {save} plans for it")


def name(tier: Tier, device: str) -> str:
    """What people call a tier."""
    if tier is Tier.DEVICE:
        return "RAM" if device == "cpu" else "GPU"
    return "RAM" if tier is Tier.HOST else "disk"


def machine_document(found: Machine) -> dict[str, object]:
    """A machine as JSON."""
    links = [
        {
            "source": source.name.lower(), "target": target.name.lower(),
            "bytes_per_second": link.bytes_per_second, "mixed_bytes_per_second": link.mixed,
            "latency_seconds": link.latency_seconds, "busy_seconds": link.busy_seconds,
        }
        for (source, target), link in found.links.items()
    ]  # fmt: skip
    return {
        "name": found.name, "flops_per_second": found.flops_per_second,
        "memory_bytes_per_second": found.memory_bytes_per_second, "launch_seconds": found.launch_seconds,
        "host_updates_per_second": found.host_updates_per_second,
        "links": links,
    }  # fmt: skip
