"""`stream`: an ordinary model whose parameters, gradients, optimizer state and tape stay within a budget."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tapestream.costs import Budget, Machine
from tapestream.errors import InputError
from tapestream.frontends.blocks import find_blocks
from tapestream.frontends.streamed import Site, Streamed
from tapestream.ir.actions import Tier
from tapestream.planning.plan import Plan

_HANDLE = "_tapestream_handle"
_SITE = "_tapestream_site"


def stream(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    budget: Budget | str | int | None = None,
    home: str = "auto",
    folder: str | os.PathLike[str] | None = None,
    planner: str = "auto",
    blocks: Sequence[nn.Module] | None = None,
    plan: Plan | None = None,
    verify: bool = False,
    machine: Machine | None = None,
    engine: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
    **knobs: Any,
) -> nn.Module:
    """Make ``model`` train within ``budget`` bytes on ``device``; the same object is returned, with the same classes
    of modules underneath, the same ``state_dict()`` keys and the same Parameter objects.

    ``budget``: bytes of DEVICE for parameters, gradients, optimizer state, tape and what runs outside the blocks
    (None: what is free now less 5%); ``Budget(device=, host=, disk=)`` limits each tier. ``home``: where blocks live
    that do not fit, ``"host"`` (GPU only), ``"disk"`` (needs ``folder``), ``"device"``, or ``"auto"``: disk if a
    folder is given, else host on a GPU. ``blocks``: the modules to stream (None: the children of the largest
    ModuleLists and Sequentials). Blocks made on the ``meta`` device are made real one at a time by their
    ``initialize()`` (or ``reset_parameters()``). ``plan`` fixes the plan; ``verify`` runs every block twice the first
    time; ``machine`` replaces measured speeds; ``engine`` names a copy engine (``"adversarial"`` for tests).

    Plans are made at the first call. Raises InputError for a model, home or folder that cannot be used, StorageError
    when the home cannot hold the blocks; BudgetError at the first call when no plan fits.
    """
    if is_streamed(model):
        raise InputError(f"this {type(model).__name__} is streamed already; call tapestream.unstream(model) first")
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    _check_device(where)
    handle = Streamed(
        model,
        find_blocks(model, blocks),
        device=where,
        budget=Budget.of(budget),
        home=_home(home, folder, where, engine),
        folder=folder,
        planner=planner,
        knobs=knobs,
        plan=plan,
        verify=verify,
        machine=machine,
        engine=engine,
        progress=progress,
    )
    for position, block in enumerate(handle.blocks):
        object.__setattr__(block, _SITE, Site(handle, position))
        _swap(block, _call_block)
    object.__setattr__(model, _HANDLE, handle)
    _swap(model, _call_model)
    return model


def unstream(model: nn.Module) -> nn.Module:
    """Undo `stream`: classes as before, parameters and gradients in memory of their own; files are removed.

    Needs room for the whole model in RAM.
    """
    handle = handle_of(model)
    handle.close()
    for block in handle.blocks:
        _swap_back(block)
        object.__delattr__(block, _SITE)
    _swap_back(model)
    object.__delattr__(model, _HANDLE)
    return model


def handle_of(model: nn.Module) -> Streamed:
    """The handle behind a streamed model. Raises InputError for any other model."""
    handle = getattr(model, _HANDLE, None)
    if not isinstance(handle, Streamed):
        raise InputError(
            f"this {type(model).__name__} is not streamed; call tapestream.stream(model, budget=...) first"
        )
    return handle


def is_streamed(model: nn.Module) -> bool:
    """Whether `stream` was called on this model."""
    return isinstance(getattr(model, _HANDLE, None), Streamed)


def _call_model(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return handle_of(self).call_model(original, args, kwargs)


def _call_block(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    site: Site = getattr(self, _SITE)
    return site.handle.call_block(site.position, original, args, kwargs)


def _swap(module: nn.Module, call: Callable[..., Any]) -> None:
    """Give ``module`` a subclass of its class: code that looks for classes still finds them."""
    base = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, lambda *a, **k: base.__call__(self, *a, **k), *args, **kwargs)

    members = {
        "__call__": __call__,
        "__module__": base.__module__,
        "__deepcopy__": _refuse_copy,
        "__reduce_ex__": _refuse_copy,
    }
    module.__class__ = type(base.__name__, (base,), members)


def _refuse_copy(self: nn.Module, *_: Any) -> Any:
    raise InputError(
        f"a streamed model or block of one cannot be copied or pickled (this {type(self).__name__}): the copy would "
        f"share its bytes. Copy or save "
        "state_dict(), or call tapestream.unstream(model) first"
    )


def _swap_back(module: nn.Module) -> None:
    module.__class__ = type(module).__mro__[1]


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={str(device)!r} was asked for; tapestream runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={str(device)!r} was asked for, but PyTorch finds no CUDA GPU; use device='cpu'")


def _home(home: str, folder: object, device: torch.device, engine: str) -> Tier:
    if home == "auto":
        if folder is not None:
            return Tier.DISK
        return Tier.HOST if device.type == "cuda" else Tier.DEVICE
    tiers = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
    if home not in tiers:
        raise InputError(f"home={home!r} was asked for; homes are 'auto', 'device', 'host' and 'disk'")
    if home == "host" and device.type == "cpu" and engine != "fake_streams":
        raise InputError(
            "home='host' was asked for with device='cpu', where the device's memory is the host's; use "
            "home='disk' with folder=..., or home='auto'"
        )
    if home == "disk" and folder is None:
        raise InputError("home='disk' was asked for without a folder; add folder='path/on/a/fast/disk'")
    return tiers[home]
