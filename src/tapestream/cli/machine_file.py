"""What ``tapestream machine --save`` writes and ``tapestream plan --machine`` reads."""

from dataclasses import dataclass
from pathlib import Path

from tapestream.costs import Machine
from tapestream.errors import InputError
from tapestream.planning import plan_file

_WHAT = "machine"


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A machine: links and FLOP/s of ``device`` ("cpu", "cuda"), bytes of RAM, and those free on the disk."""

    device: str
    machine: Machine
    ram_nbytes: int
    disk_nbytes: int


def save(path: Path, found: MeasuredMachine) -> None:
    """Write it beside ``path`` and rename that. Raises StorageError where that cannot be."""
    document = {
        "device": found.device, "machine": plan_file.machine_to_json(found.machine),
        "ram_nbytes": found.ram_nbytes, "disk_free_nbytes": found.disk_nbytes,
    }  # fmt: skip
    plan_file.write(path, document, _WHAT)


def load(path: Path) -> MeasuredMachine:
    """Read it. Raises InputError for a file that is missing, damaged, or something else."""
    with plan_file.reading(path, _WHAT) as document:
        machine = plan_file.machine_from_json(document["machine"])
        if machine is None or not machine.links:
            raise InputError("it has no links")
        if document["device"] not in ("cpu", "cuda"):
            raise InputError(f"its device is {document['device']!r}")
        room = document["ram_nbytes"], document["disk_free_nbytes"]
        if not all(isinstance(nbytes, int) and nbytes >= 0 for nbytes in room):
            raise InputError(f"its RAM and disk are {room[0]!r} and {room[1]!r}")
        return MeasuredMachine(document["device"], machine, *room)
