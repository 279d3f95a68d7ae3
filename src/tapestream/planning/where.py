"""Where blocks are updated: on the device, or in RAM below it."""

from typing import Literal, TypeAlias

from tapestream.costs import Profile
from tapestream.errors import InputError
from tapestream.ir import Kind, Tier
from tapestream.ir.homes import HomeTiers

Where: TypeAlias = Literal["device", "host"]


def hosted_blocks(profile: Profile, homes: HomeTiers) -> frozenset[int]:
    """The blocks that are updated in HOST: all that are trained. Raises InputError where they do not live there, where
    ranks divide them, or where nobody knows how long it takes."""
    trained = {block: cost for block, cost in enumerate(profile.blocks) if cost.gradient_nbytes}
    elsewhere = next((kind for kind in (Kind.PARAMETERS, *_USED) if homes[kind] is not Tier.HOST), None)
    if trained and elsewhere is not None:
        raise InputError(
            f"updates in HOST (where='host') were asked for, but {elsewhere.value} is at home in "
            f"{homes[elsewhere].name}: let blocks live in RAM below a GPU (home='host'), or use where='device'"
        )
    if trained and profile.shards > 1:
        raise InputError(
            "updates in HOST (where='host') were asked for, but ranks divide each block among them: use "
            "where='device', or give each rank a copy (ts.Peers() without shard=True)"
        )
    unknown = next((block for block, cost in trained.items() if cost.host_update_seconds is None), None)
    if unknown is not None:
        raise InputError(
            f"updates in HOST (where='host') were asked for, but the profile does not say how long that of block "
            f"{unknown} takes; give BlockCost.host_update_seconds"
        )
    return frozenset(trained)


_USED = (Kind.GRADIENT, Kind.OPTIMIZER_STATE)
