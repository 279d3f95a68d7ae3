"""Several GPUs that train one model together: how many, in how many machines, and what joins them. Without PyTorch."""

from dataclasses import dataclass

from tapestream.cli import checks
from tapestream.costs import Link
from tapestream.errors import InputError
from tapestream.ir.actions import Tier

_PEERS, _NETWORK = "25GB/s", "12.5GB/s"
_LATENCY_SECONDS = 50e-6  # of one collective operation, from start to end


@dataclass(frozen=True, slots=True)
class Ranks:
    """``count`` GPUs in ``machines``, each with an equal share of its machine's RAM and disk. ``replicate``: each
    machine has all shards; else all GPUs share them. Bytes per second: ``peers`` of a GPU from and to those beside it,
    ``network`` of a machine."""

    count: int = 1
    machines: int = 1
    replicate: bool = False
    peers: float = 0.0
    network: float = 0.0

    @property
    def in_one(self) -> int:
        """Ranks of one machine."""
        return self.count // self.machines

    @property
    def shards(self) -> int:
        """Among how many a block's bytes are divided."""
        return self.in_one if self.replicate else self.count

    @property
    def may_replicate(self) -> bool:
        """Whether there are two ways: several machines, each of several GPUs."""
        return self.machines > 1 and self.in_one > 1

    def links(self) -> tuple[Link | None, Link | None]:
        """For gathers, and for sums. A ring that passes several machines is as fast as its slowest part; where machines
        replicate, sums go on around all of them."""
        if self.shards == 1:
            return None, None
        inside = self.peers if self.in_one > 1 else self.network
        ring = min(inside, self.network) if self.machines > 1 else inside
        if not self.replicate:
            return Link(ring, _LATENCY_SECONDS), Link(ring, _LATENCY_SECONDS)
        others = 1 - 1 / self.in_one  # of a block's bytes, those that other ranks of the machine have
        seconds = others / self.peers + 2 * (1 - 1 / self.machines) / self.network
        return Link(self.peers, _LATENCY_SECONDS), Link(others / seconds, 2 * _LATENCY_SECONDS)

    def __str__(self) -> str:
        one = f"{self.count} GPUs" if self.machines == 1 else f"{self.machines} machines of {self.in_one} GPUs"
        return one + (", each with all shards" if self.replicate else "")


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """The options of ``tapestream plan`` about several GPUs, as they are written; None: not given."""

    ranks: int | None = None
    machines: int | None = None
    replicate: bool = False
    peers: str | None = None
    network: str | None = None

    def found(self) -> Ranks:
        """What is given, else what is usual. Raises InputError for what cannot be, and for an option without effect."""
        count, machines = self.ranks or 1, self.machines or 1
        given = (("--machines", self.machines), ("--replicate", self.replicate or None),
                 ("--peers", self.peers), ("--network", self.network))  # fmt: skip
        for option, value in given if count == 1 else ():
            if value is not None:
                checks.no_effect(option, "one GPU", "add --ranks, the number of GPUs")
        if count % machines:
            raise InputError(
                f"--ranks {count} and --machines {machines} were asked for, but each machine has as many GPUs: give "
                f"--ranks {-(-count // machines) * machines}, say"
            )
        for option, value in given[1:] if machines == 1 else ():
            if value is not None and option != "--peers":
                checks.no_effect(option, "one machine", "add --machines")
        for option, value in (given[1], given[2]) if count == machines else ():
            if value is not None and count > 1:
                checks.no_effect(option, "one GPU in each machine")
        peers = checks.rate("--peers", self.peers or _PEERS)
        return Ranks(count, machines, self.replicate, peers, checks.rate("--network", self.network or _NETWORK))


NONE = RanksOptions()


def shared_links(links: dict[tuple[Tier, Tier], Link], ranks: int) -> dict[tuple[Tier, Tier], Link]:
    """The same with the disk shared by so many ranks."""
    return {
        ends: Link(link.bytes_per_second / ranks, link.latency_seconds) if Tier.DISK in ends else link
        for ends, link in links.items()
    }
