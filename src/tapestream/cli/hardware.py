"""What a step is planned for: bytes and speeds, and whose they are. Without PyTorch."""

import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tapestream.cli import checks
from tapestream.cli.ranks import ALONE, NONE, Ranks, RanksOptions, shared_links
from tapestream.cli.told import told
from tapestream.costs import Link, Machine
from tapestream.costs.machine import Links, usual_links
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError, InputError
from tapestream.ir.actions import Tier
from tapestream.units import parse_nbytes

if TYPE_CHECKING:
    from tapestream.cli.machine_file import MeasuredMachine

_SUMS = (Tier.DEVICE, Tier.SHARD)
_MINE, _GIVEN, _CHANGED = "this machine's", "given", "with that change"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that there are, and whose: ``"given"``, ``"this machine's"``, ``"box.json's"``."""

    nbytes: int
    whose: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """``budget``: bytes allowed on the device, which has ``device_nbytes`` (None: nobody knows). ``ram``: on the CPU it
    is the device, ``ram_option`` is what limits it. ``ram`` and ``disk`` are a machine's, speeds those of one rank."""

    device: str
    budget: int
    device_nbytes: int | None
    ram: Capacity
    disk: Capacity
    machine: Machine
    ram_option: str = "--ram"
    ranks: Ranks = ALONE

    def changed(self, change: Mapping[str, str]) -> "Hardware":
        """The same with other values of some options."""
        ram, disk = (change.get(option) for option in (self.ram_option, "--disk"))
        return replace(
            self,
            ram=self.ram if ram is None else Capacity(parse_nbytes(ram), _CHANGED),
            disk=self.disk if disk is None else Capacity(parse_nbytes(disk), _CHANGED),
        )

    def otherwise(self) -> "Hardware":
        """The same where machines replicate what they now share, or share what they replicate."""
        ranks = replace(self.ranks, replicate=not self.ranks.replicate)
        return replace(self, ranks=ranks, machine=_joined(self.machine, ranks))

    def told(self, refusal: BudgetError) -> str:
        """Why something does not fit, with options in the place of arguments of Python."""
        return told(str(refusal)).replace("--ram", self.ram_option).replace("--host-budget", self.ram_option)


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The options of ``tapestream plan`` that are about hardware, as they are written; None: not given."""

    device: str | None = None
    budget: str | None = None
    gpu: str | None = None
    host_budget: str | None = None
    ram: str | None = None
    disk: str | None = None
    home: str = "auto"
    folder: Path | None = None
    link: str | None = None
    disk_read: str | None = None
    disk_write: str | None = None
    flops: str | None = None
    memory_rate: str | None = None
    host_update: str | None = None
    machine: Path | None = None
    ranks: RanksOptions = NONE

    def found(self) -> Hardware:
        """What is given, and for the rest what is measured or usual. Raises InputError for what cannot be, and for an
        option that has no effect beside the others."""
        measured = None if self.machine is None else self._measured(self.machine)
        device = self.device or ("cuda" if measured is None else measured.device)
        checks.one_of("--device", device, ("cpu", "cuda"))
        if measured is not None and measured.device != device:
            raise InputError(
                f"--machine {self.machine} was measured with --device {measured.device} and holds no speeds of "
                f"--device {device}; leave --device out"
            )
        self._check_effects(device)
        allowed = self.budget or self.gpu or (self.ram if device == "cpu" else None)
        if allowed is None:
            raise InputError("how much may the step take? Add --budget, for example --budget 12GiB")
        ranks = self.ranks.found()
        option = "--budget" if self.budget else "--gpu" if self.gpu else "--ram"
        ram = self._ram(measured)
        return Hardware(
            device, checks.size(option, allowed),
            self._device_nbytes(device, ram),
            ram, self._disk(measured), self._speeds(device, measured, ranks),
            "--ram" if self.host_budget is None else "--host-budget", ranks,
        )  # fmt: skip

    def _device_nbytes(self, device: str, ram: Capacity) -> int | None:
        """Bytes of the device, where they are given; a plan may be for another machine than this."""
        if device == "cpu":
            return None if ram.whose == _MINE else ram.nbytes
        return checks.maybe_size("--gpu", self.gpu)

    @staticmethod
    def _measured(path: Path) -> "MeasuredMachine":
        if not path.is_file():
            raise InputError(
                f"--machine {path} was asked for, but there is no such file; make one there, with "
                f"`tapestream machine --save {path}`"
            )
        from tapestream.cli.machine_file import load

        return load(path)

    def _check_effects(self, device: str) -> None:
        checks.one_of("--home", self.home, checks.HOMES)
        if device == "cpu":
            for option, given in (("--link", self.link), ("--gpu", self.gpu), ("--host-update", self.host_update)):
                if given is not None:
                    checks.no_effect(option, "--device cpu, where no GPU is planned for")
        checks.check_homes(device, "auto" if self.home == "disk" else self.home, self.folder, self.host_budget)
        if self.host_budget is not None and self.ram is not None:
            checks.no_effect("--ram", "--host-budget, which says how much of it is used")
        if self.folder is not None and self.disk is not None:
            checks.no_effect("--folder", "--disk, which says how much is free")
        if self.home == "host":
            for option, given in (
                ("--disk", self.disk), ("--disk-read", self.disk_read), ("--disk-write", self.disk_write),
            ):  # fmt: skip
                if given is not None:
                    checks.no_effect(option, "--home host")

    def _ram(self, measured: "MeasuredMachine | None") -> Capacity:
        for option, text in (("--host-budget", self.host_budget), ("--ram", self.ram)):
            if text is not None:
                return Capacity(checks.size(option, text, least=0), _GIVEN)
        if measured is not None:
            return Capacity(measured.ram_nbytes, self._whose())
        from tapestream.system.limits import total_nbytes  # whose imports take time that completion does not have

        return Capacity(total_nbytes(), _MINE)

    def _disk(self, measured: "MeasuredMachine | None") -> Capacity:
        if self.disk is not None:
            return Capacity(checks.size("--disk", self.disk, least=0), _GIVEN)
        if self.folder is not None and not self.folder.is_dir():
            raise InputError(
                f"--folder {self.folder} was asked for, but there is no such folder; create it or give --disk 2TB"
            )
        if measured is not None and self.folder is None:
            return Capacity(measured.disk_nbytes, self._whose())
        return Capacity(shutil.disk_usage(self.folder or Path()).free, _MINE)

    def _whose(self) -> str:
        return "" if self.machine is None else f"{self.machine.name}'s"

    def _speeds(self, device: str, measured: "MeasuredMachine | None", ranks: Ranks) -> Machine:
        known = None if measured is None else measured.machine
        computing = usual_rates(device) if known is None else known.rates(usual_rates(device))
        speeds = {"link": self.link, "read": self.disk_read, "write": self.disk_write}
        options = {"link": "--link", "read": "--disk-read", "write": "--disk-write"}
        given = {kind: checks.rate(options[kind], text) for kind, text in speeds.items() if text is not None}
        usual = usual_links(device, **given)
        links = _chosen(usual, {} if known is None else known.links, given)
        alone = Machine(
            shared_links(links, ranks.in_one),
            computing.flops_per_second if self.flops is None else checks.flops(self.flops),
            "" if known is None else known.name,
            computing.memory_bytes_per_second if self.memory_rate is None
            else checks.rate("--memory-rate", self.memory_rate),
            computing.launch_seconds, None,
            computing.host_updates_per_second if self.host_update is None else checks.updates(self.host_update),
        )  # fmt: skip
        return _joined(alone, ranks)


def _joined(machine: Machine, ranks: Ranks) -> Machine:
    """One rank's machine with what joins it to the others."""
    gathers, sums = ranks.links()
    links = {ends: link for ends, link in machine.links.items() if ends != _SUMS}
    if sums is not None and sums != gathers:
        links[_SUMS] = sums
    return replace(machine, links=links, peers=gathers)


def _chosen(usual: Links, measured: Mapping[tuple[Tier, Tier], Link], given: Container[str]) -> Links:
    """Links that are given, else those that were measured, else the usual ones."""
    found = dict(usual)
    for ends in usual:
        kind = "read" if ends[0] is Tier.DISK else "write" if ends[1] is Tier.DISK else "link"
        if kind not in given and ends in measured:
            found[ends] = measured[ends]
    return found
