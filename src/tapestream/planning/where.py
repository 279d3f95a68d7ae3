"""Where blocks are updated: on the device, or in RAM below it."""

from typing import Literal, TypeAlias

from tapestream.costs import Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Kind, Tier, Value
from tapestream.ir.homes import KINDS, HomeTiers
from tapestream.passes.host_updates import NONE_HOSTED, Hosted
from tapestream.passes.residency import UpdateMode

Where: TypeAlias = Literal["device", "host", "mixed"]
"""All blocks on the device; all in RAM; each where the plan says."""


def check_where(where: str, homes: HomeTiers, *, direct: bool) -> Where:
    """Where blocks with these homes are updated if "auto", "device", "host" or "mixed" was asked for; ``direct``:
    nothing is between the device and the disk. Raises InputError."""
    if where not in ("auto", "device", "host", "mixed"):
        raise InputError(f"where={where!r} was asked for; it is 'auto', 'device', 'host' or 'mixed'")
    if where not in ("host", "mixed"):
        return "device"  # whose bits the CPU's kernels were measured to give of no optimizer yet
    _check_homes(homes, direct=direct)
    return "host" if where == "host" else "mixed"


def go_on(homes: HomeTiers) -> bool:
    """Whether updates in HOST may go on after their step. What lives on the disk is brought for them within it: reading
    and writing takes so long that little of it would be hidden by the next forward."""
    return all(homes[kind] is Tier.HOST for kind in KINDS)


def hosted_at(
    where: Where,
    profile: Profile,
    homes: HomeTiers,
    machine: Machine | None,
    update: UpdateMode,
    on_device: frozenset[int] | None,
    on_disk: frozenset[Value] | None,
) -> Hosted:
    """The blocks that are updated in HOST: none, or all that are trained (where they are "mixed", but
    those ``on_device``; None: all may be); of those that have values ``on_disk``, which come for an update, none goes
    on after its step. Raises InputError, see `hosted_blocks`."""
    if where == "device" or update is None:
        return NONE_HOSTED
    blocks = hosted_blocks(profile, homes, machine)
    if where == "mixed" and on_device is not None:
        blocks -= on_device
    late = blocks if update == "step" and go_on(homes) else frozenset()
    return Hosted(blocks, late - {value.index for value in on_disk or () if value.kind is not Kind.BUFFERS})


def hosted_blocks(profile: Profile, homes: HomeTiers, machine: Machine | None) -> frozenset[int]:
    """Those that may be: all that are trained. Raises InputError where they do not live there or
    below, where ranks divide them, or where nobody knows how long it takes."""
    trained = {block: cost for block, cost in enumerate(profile.blocks) if cost.gradient_nbytes}
    if trained:
        _check_homes(homes, direct=machine is not None and (Tier.DISK, Tier.HOST) not in machine.links)
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


def _check_homes(homes: HomeTiers, *, direct: bool) -> None:
    elsewhere = next((kind for kind in KINDS if homes[kind] is Tier.DEVICE), None)
    elsewhere = next((kind for kind in KINDS if direct and homes[kind] is Tier.DISK), elsewhere)
    if elsewhere is not None:
        raise InputError(
            f"updates in RAM (where='host' or 'mixed') were asked for, but {elsewhere.value} of blocks live in "
            f"{homes[elsewhere].name}{' and RAM is the device' * direct}: where='host' is for blocks at home in RAM or "
            "on disk below a GPU (home='host', home='disk'); else use where='device'"
        )
