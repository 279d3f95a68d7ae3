"""``tapestream machine``: how fast bytes move between tiers here, measured."""

from tapestream.cli import show
from tapestream.cli.options import Device, Folder, Json, chosen_device, reported
from tapestream.costs import Machine
from tapestream.ir.actions import Tier
from tapestream.planning.measure import measure_machine
from tapestream.units import format_seconds


@reported
def machine(
    folder: Folder = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Measure links, disk and FLOP/s of this machine, in a few seconds."""
    chosen = chosen_device(device)
    found = measure_machine(chosen, folder)
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
    show.line(f"float32 matrix products: {show.flops(found.flops_per_second)}")


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
    return {"name": found.name, "flops_per_second": found.flops_per_second, "links": links}
