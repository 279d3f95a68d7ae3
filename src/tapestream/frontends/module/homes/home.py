"""`Home`: where the blocks of a streamed model live, kind by kind."""

from dataclasses import dataclass

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError
from tapestream.frontends.below import check_folder
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import HomeTiers, home_tiers

_TIERS = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}


@dataclass(frozen=True, slots=True)
class Home:
    """The tier of each kind of block value: ``"device"`` (all kinds or none), ``"host"`` (GPU only), ``"disk"`` (needs
    a folder) or ``"auto"``: RAM, and for what finds no room there the disk, value by value, if a folder is given.

    Whatever a plan has room for stays on the device all the same. On the CPU "auto" is the folder if there is one, else
    RAM.
    """

    parameters: str = "auto"
    gradients: str = "auto"
    optimizer_state: str = "auto"


def tiers_for(home: str | Home, *, folder: object, device: torch.device, engine: str) -> HomeTiers:
    """The tiers that ``home`` means here. Raises InputError for one that cannot be."""
    check_folder(folder)
    asked = home if isinstance(home, Home) else Home(home, home, home)
    tiers, overflowing = dict[Kind, Tier](), list[Kind]()
    for kind, name in (
        (Kind.PARAMETERS, asked.parameters),
        (Kind.GRADIENT, asked.gradients),
        (Kind.OPTIMIZER_STATE, asked.optimizer_state),
    ):
        _check(name, folder, device, engine)
        if name != "auto":
            tier = _TIERS[name]
        elif is_accelerator(device) or engine == "fake_streams":
            tier = Tier.HOST
        else:
            tier = Tier.DEVICE if folder is None else Tier.DISK
        tiers[kind] = tier
        if name == "auto" and folder is not None:
            overflowing.append(kind)
    if Kind.PARAMETERS in overflowing:
        overflowing.append(Kind.BUFFERS)
    return home_tiers(tiers | {Kind.BUFFERS: tiers[Kind.PARAMETERS]}, overflowing)


def _check(name: str, folder: object, device: torch.device, engine: str) -> None:
    if name not in ("auto", *_TIERS):
        raise InputError(f"home={name!r} was asked for; homes are 'auto', 'device', 'host' and 'disk'")
    if name == "host" and not is_accelerator(device) and engine != "fake_streams":
        raise InputError(
            "home='host' was asked for with device='cpu', where the device's memory is the host's; use "
            "home='disk' with folder=..., or home='auto'"
        )
    if name == "disk" and folder is None:
        raise InputError("home='disk' was asked for without a folder; add folder='path/on/a/fast/disk'")
