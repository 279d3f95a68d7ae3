"""Where block values live that are not on the device: one tier for all, or one for each kind; and what may overflow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tapestream.errors import InputError
from tapestream.ir.actions import Kind, Tier

KINDS = (Kind.PARAMETERS, Kind.BUFFERS, Kind.GRADIENT, Kind.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True)
class HomeTiers:
    """The home of every kind of block value. Of ``overflowing`` kinds, values for which the host has no room live on
    the disk."""

    of: Mapping[Kind, Tier]
    overflowing: frozenset[Kind] = frozenset()

    def __getitem__(self, kind: Kind) -> Tier:
        return self.of[kind]

    def use(self, tier: Tier) -> bool:
        """Whether values may live in ``tier``."""
        return tier in self.of.values() or (tier is Tier.DISK and bool(self.overflowing))


HomeLike: TypeAlias = Tier | Mapping[Kind, Tier] | HomeTiers


def home_tiers(home: HomeLike, overflowing: Iterable[Kind] = ()) -> HomeTiers:
    """The home of every kind; buffers are with the parameters. ``overflowing``: those that may; only what lives on the
    host does.

    Raises InputError where some kinds but not all have the device for a home: what stays there is a plan's business.
    """
    if isinstance(home, HomeTiers):
        return home
    tiers = dict.fromkeys(KINDS, home) if isinstance(home, Tier) else dict(home)
    if len({tier is Tier.DEVICE for tier in tiers.values()}) > 1:
        names = ", ".join(f"{kind.value} in {tier.name}" for kind, tier in tiers.items())
        raise InputError(
            f"a home for each kind was asked for, but only some of them are the device ({names}); plans keep on the "
            "device what fits: give those kinds the host or the disk, or all kinds the device"
        )
    return HomeTiers(tiers, frozenset(kind for kind in overflowing if tiers[kind] is Tier.HOST))
