"""Where block values live that are not on the device: one tier for all, or one for each kind."""

from collections.abc import Mapping
from typing import TypeAlias

from tapestream.errors import InputError
from tapestream.ir.actions import Kind, Tier

HomeTiers: TypeAlias = Mapping[Kind, Tier]


def home_tiers(home: Tier | HomeTiers) -> HomeTiers:
    """The home of every kind of block value; buffers are with the parameters.

    Raises InputError where some kinds but not all have the device for a home: what stays there is a plan's business.
    """
    if isinstance(home, Tier):
        return dict.fromkeys((Kind.PARAMETERS, Kind.BUFFERS, Kind.GRADIENT, Kind.OPTIMIZER_STATE), home)
    if len({tier is Tier.DEVICE for tier in home.values()}) > 1:
        names = ", ".join(f"{kind.value} in {tier.name}" for kind, tier in home.items())
        raise InputError(
            f"a home for each kind was asked for, but only some of them are the device ({names}); plans keep on the "
            "device what fits: give those kinds the host or the disk, or all kinds the device"
        )
    return home
