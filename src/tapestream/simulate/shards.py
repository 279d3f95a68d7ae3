"""The rules about blocks whose bytes are divided among ranks: whole copies on DEVICE, shards everywhere else.

A gradient is whole on DEVICE and this rank's alone; its copy in SHARD is the sum over all ranks, of which this rank has
a part. The copy from one to the other is that sum, which adds to what earlier backwards have left in SHARD.
"""

from typing import TYPE_CHECKING

from tapestream.costs.profile import SUMMED_AT_ONCE, sharded
from tapestream.ir import Kind, Tier, Value
from tapestream.simulate.explain import broken, name_of

if TYPE_CHECKING:
    from tapestream.simulate.places import Places

_DEVICE, _SHARD = 1 << Tier.DEVICE, 1 << Tier.SHARD


def start(places: "Places", value: Value, source: Tier, target: Tier, nbytes: int) -> int:
    """A copy of a value, whole of so many bytes, begins: returns the bytes that it moves. From a shard to the whole, or
    back, those are the other ranks'. A sum takes memory for what comes from them."""
    kind = value.kind
    if places.shards == 1 or kind.by_stage:
        if Tier.SHARD in (source, target):
            broken(f"{name_of(value)} has no shards; only blocks that are divided among ranks have")
        return nbytes
    shard = sharded(nbytes, kind, Tier.SHARD, places.shards)
    if {source, target} != {Tier.DEVICE, Tier.SHARD}:
        if Tier.DEVICE in (source, target):
            broken(f"{name_of(value)} is whole on DEVICE, and a shard of it in other tiers; it goes by way of SHARD")
        return shard
    if kind is Kind.OPTIMIZER_STATE:
        broken(f"{name_of(value)} is nowhere whole; it is updated in SHARD")
    if source is Tier.DEVICE and kind is not Kind.GRADIENT:
        broken(f"{name_of(value)} need not be copied to SHARD: nothing changes it on DEVICE; Prefetch it from below")
    if source is Tier.SHARD and kind is Kind.GRADIENT:
        broken(f"{name_of(value)} in SHARD is a sum over ranks, which no backward on DEVICE may add to")
    if source is Tier.DEVICE:
        places.memory.nbytes[Tier.DEVICE] += min(nbytes, SUMMED_AT_ONCE)
    return nbytes - shard


def arrived(places: "Places", value: Value, source: Tier, target: Tier) -> None:
    """A copy has ended. Of a gradient that was summed the whole is of no use any more."""
    if source is not Tier.DEVICE or target is not Tier.SHARD:
        return
    places.memory.nbytes[Tier.DEVICE] -= min(places.nbytes_of(value.kind, value.index), SUMMED_AT_ONCE)
    del places.current[value.kind][value.index]
    places.stale[value.kind][value.index] = places.stale[value.kind].get(value.index, 0) | _DEVICE


def add_gradient(places: "Places", block: int) -> bool:
    """A backward makes, on DEVICE, a gradient of which earlier ones have left a sum elsewhere. False: there is none."""
    found, stale = (copies[Kind.GRADIENT].get(block, 0) for copies in (places.current, places.stale))
    if stale & _DEVICE:
        where = places.whereabouts(Kind.GRADIENT, block)
        broken(f"{where}: it was summed over ranks; Free it on DEVICE before more is added")
    if not found:
        return False
    if not found & _SHARD:
        where = places.whereabouts(Kind.GRADIENT, block)
        broken(f"{where} but not in SHARD, where sums over ranks are added to it; Prefetch it first")
    places.make(Kind.GRADIENT, block)
    places.write(Kind.GRADIENT, block, Tier.DEVICE)
    return True


def check_free(places: "Places", kind: Kind, number: int, tier: Tier) -> None:
    """An earlier sum must not go before the next one is added to it."""
    if kind is Kind.GRADIENT and tier is Tier.SHARD and places.current[kind].get(number, 0) & _DEVICE:
        broken(f"{places.whereabouts(kind, number)}: the copy in SHARD is to be added to; Offload to it first")


def check_all_summed(places: "Places") -> None:
    """At the end of a step no gradient may be one rank's alone."""
    for block, tiers in places.current[Kind.GRADIENT].items():
        if places.shards > 1 and tiers & _DEVICE:
            broken(f"GRADIENT {block} was not summed over ranks; Offload it from DEVICE to SHARD")
