"""`Machine`: how fast bytes move between tiers and how fast the device computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tapestream.costs.checks import duration, speed
from tapestream.costs.rates import Rates
from tapestream.errors import InputError
from tapestream.ir.actions import Tier


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers.

    ``bytes_per_second``: while the other direction is idle. ``mixed_bytes_per_second``: while both directions are busy
    (None: the same). Each copy adds ``latency_seconds`` on the link, and ``busy_seconds`` in which compute stands
    still: the time that the computing thread takes to start and to receive it. (Moving saved tensors takes as many
    copies as `StageCost.saved_storages` says, moving any other value takes one.)
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    mixed_bytes_per_second: float | None = None
    busy_seconds: float = 0.0

    def __post_init__(self) -> None:
        speed("Link", "bytes_per_second", self.bytes_per_second)
        duration("Link", "latency_seconds", self.latency_seconds)
        duration("Link", "busy_seconds", self.busy_seconds)
        if self.mixed_bytes_per_second is not None:
            speed("Link", "mixed_bytes_per_second", self.mixed_bytes_per_second)

    @property
    def mixed(self) -> float:
        """Bytes per second while both directions are busy."""
        return self.mixed_bytes_per_second or self.bytes_per_second

    def seconds(self, nbytes: int) -> float:
        """Seconds of one copy that compute waits for, with nothing else on the link."""
        return self.busy_seconds + self.latency_seconds + nbytes / self.bytes_per_second


Links: TypeAlias = dict[tuple[Tier, Tier], Link]
"""By source and target."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The links by (source, target), and a name for people; of the device, how many FLOP/s it makes, how many bytes a
    second it reads and writes of its memory, and what it takes to start one operation; how many parameters a second an
    optimizer updates in RAM below it (each None if unknown).

    ``peers``: what the shards of other ranks come by, and parts of gradients go by; a rank receives, and sends, so many
    bytes a second of its own. Such copies go one after the other, whatever their direction. ``links`` may say
    otherwise of gathers (SHARD to DEVICE) or sums (DEVICE to SHARD).
    """

    links: dict[tuple[Tier, Tier], Link] = field(default_factory=dict)
    flops_per_second: float | None = None
    name: str = ""
    memory_bytes_per_second: float | None = None
    launch_seconds: float | None = None
    peers: Link | None = None
    host_updates_per_second: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.links, Mapping) or not all(isinstance(link, Link) for link in self.links.values()):
            raise InputError(f"Machine: links is a dict from (source, target) to Link, not {self.links!r}")
        for ends in self.links:
            if not (isinstance(ends, tuple) and len(ends) == 2 and all(isinstance(end, Tier) for end in ends)):
                raise InputError(
                    f"Machine: a link goes from one Tier to another, such as (Tier.HOST, Tier.DEVICE), not {ends!r}"
                )
        if not isinstance(self.peers, Link | None):
            raise InputError(f"Machine: peers is a Link or None, not {self.peers!r}")
        for name in ("flops_per_second", "memory_bytes_per_second", "host_updates_per_second"):
            if getattr(self, name) is not None:
                speed("Machine", name, getattr(self, name))
        if self.launch_seconds is not None:
            duration("Machine", "launch_seconds", self.launch_seconds)

    def rates(self, usual: Rates) -> Rates:
        """How fast the device computes; ``usual``: what is taken for unknown."""
        known = ((name, getattr(self, name)) for name in usual.__slots__)
        return replace(usual, **{name: value for name, value in known if value is not None})

    def link(self, source: Tier, target: Tier) -> Link:
        """The link from ``source`` to ``target``: between a shard and the whole, that to other ranks. Raises InputError
        if the machine has none."""
        if source.memory is target.memory and (source, target) not in self.links:
            return self._to_peers()
        found = self.links.get((source, target)) or self.links.get((source.memory, target.memory))
        if found is None:
            raise InputError(
                f"the machine has no link from {source.name} to {target.name}; measure one with "
                "tapestream.measure_machine(folder=...) or give Machine(links={...})"
            )
        return found

    def _to_peers(self) -> Link:
        if self.peers is None:
            raise InputError(
                "the machine has no link to other ranks, among which blocks are divided; measure one with "
                "tapestream.measure_machine() in each of them, or give Machine(peers=Link(...))"
            )
        return self.peers

    def route(self, home: Tier) -> tuple[Tier, ...]:
        """The tiers that a value passes from ``home`` up to the device, both included."""
        if home is Tier.DEVICE:
            return (Tier.DEVICE,)
        if home is Tier.DISK and (Tier.DISK, Tier.DEVICE) not in self.links:
            return (Tier.DISK, Tier.HOST, Tier.DEVICE)
        return (home, Tier.DEVICE)


def usual_links(device: str, *, link: float = 25e9, read: float = 3e9, write: float = 2e9) -> Links:
    """Where nothing else is known of the tiers below a ``device``, "cpu" or an accelerator: bytes per second of each
    link, between RAM and an accelerator, and to and from a disk, which is reached through RAM."""
    reading, writing, wire = Link(read), Link(write), Link(link)
    if device == "cpu":
        return {(Tier.DISK, Tier.DEVICE): reading, (Tier.DEVICE, Tier.DISK): writing}
    return {
        (Tier.DISK, Tier.HOST): reading, (Tier.HOST, Tier.DISK): writing,
        (Tier.HOST, Tier.DEVICE): wire, (Tier.DEVICE, Tier.HOST): wire,
    }  # fmt: skip
