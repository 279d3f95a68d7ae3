"""`Home`: where the blocks of a streamed model live, kind by kind."""

from dataclasses import dataclass

import torch
from torch import nn

from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget
from tapestream.errors import InputError
from tapestream.frontends.available import host_limit
from tapestream.frontends.below import check_folder
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import HomeTiers, home_tiers

_TIERS = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
_STATE = 8  # bytes of optimizer state per element that "auto" expects: two fp32 moments


@dataclass(frozen=True, slots=True)
class Home:
    """The tier of each kind of block value: ``"device"`` (all kinds or none), ``"host"`` (GPU only), ``"disk"`` (needs
    a folder) or ``"auto"``: the fastest that has room; disk only if a folder is given.

    Whatever a plan has room for stays on the device all the same. On a GPU "auto" expects two fp32 moments for each
    trainable element, and an fp32 master of each 16-bit one. On the CPU "auto" is the folder if there is one, else RAM.
    """

    parameters: str = "auto"
    gradients: str = "auto"
    optimizer_state: str = "auto"


def tiers_for(
    home: str | Home, model: nn.Module, budget: Budget, *, folder: object, device: torch.device, engine: str
) -> HomeTiers:
    """The tiers that ``home`` means here. Raises InputError for one that cannot be."""
    check_folder(folder)
    asked = home if isinstance(home, Home) else Home(home, home, home)
    room = host_limit(budget)
    parameters, tiers = list(model.parameters()), dict[Kind, Tier]()
    for kind, name, nbytes in (
        (Kind.PARAMETERS, asked.parameters, sum(p.numel() * p.itemsize for p in parameters)),
        (Kind.GRADIENT, asked.gradients, sum(p.numel() * p.itemsize for p in parameters if p.requires_grad)),
        (Kind.OPTIMIZER_STATE, asked.optimizer_state, _state_nbytes(model)),
    ):
        _check(name, folder, device, engine)
        if name != "auto":
            tier = _TIERS[name]
        elif not is_accelerator(device):
            tier = Tier.DEVICE if folder is None else Tier.DISK
        else:
            tier = Tier.HOST if folder is None or nbytes <= room else Tier.DISK
        tiers[kind] = tier
        room -= nbytes if tier is Tier.HOST else 0
    return home_tiers(tiers | {Kind.BUFFERS: tiers[Kind.PARAMETERS]})


def _state_nbytes(model: nn.Module) -> int:
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() * (_STATE + (4 if p.itemsize < 4 else 0)) for p in trained)


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
