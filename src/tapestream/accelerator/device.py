"""Which device is it, and what can it do?"""

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.errors import InputError


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of device beside the CPU.

    ``streams``: it has streams and events, and copies from and to page-locked memory run beside its compute.
    ``registers``: memory that is there already can be page-locked (``cudaHostRegister``, which ROCm has under the same
    name); where it cannot, PyTorch's allocator of page-locked memory is asked. ``granule_nbytes``: its caching
    allocator takes multiples of this.
    """

    kind: str
    streams: bool = True
    registers: bool = False
    granule_nbytes: int = 512


_BACKENDS = (Backend("cuda", registers=True), Backend("xpu"))
_CPU = ("cpu", "meta")  # fake tensors say what they stand for; meta tensors have no memory


def backend_of(device: torch.device) -> Backend | None:
    """What ``device`` is beside the CPU; None for the CPU itself. Raises InputError for a kind that is not served."""
    if device.type in _CPU:
        return None
    for backend in _BACKENDS:
        if backend.kind == device.type:
            return backend
    if device.type == torch._C._get_privateuse1_backend_name():
        return Backend(device.type)
    if device.type == "mps":
        raise InputError(
            "the device 'mps' shares one memory with the CPU, so moving tensors to the host frees nothing, and it is "
            "not tested; use device='cpu', with folder= or home='disk' if RAM is too small"
        )
    raise InputError(
        f"the device {str(device)!r} is not supported; devices are 'cpu', "
        f"{', '.join(repr(b.kind) for b in _BACKENDS)} and backends that PyTorch knows as PrivateUse1"
    )


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` has memory and streams of its own. Raises InputError as `backend_of` does."""
    return backend_of(device) is not None


def indexed(device: torch.device) -> torch.device:
    """``device`` with its number: the current one's, where it has none. Which one is current may change later."""
    if device.index is not None or not is_accelerator(device):
        return device
    return torch.device(device.type, module_of(device).current_device())


def default_device() -> torch.device:
    """The accelerator of this process if there is one that is served, else the CPU."""
    found = _present()
    if found is None or found.type == "mps":
        return torch.device("cpu")
    return torch.device(found.type)


def is_present(device: torch.device) -> bool:
    """Whether PyTorch finds such a device here."""
    module = getattr(torch, device.type, None)
    return not is_accelerator(device) or (module is not None and bool(module.is_available()))


def in_use() -> torch.device | None:
    """The kind of accelerator that this process has used by now; None where asking would only start one up."""
    found = _present()
    if found is None or found.type == "mps":
        return None
    started = getattr(module_of(found), "is_initialized", None)
    return found if started is None or started() else None


def devices(kind: torch.device) -> list[torch.device]:
    """All devices of the kind."""
    return [torch.device(kind.type, number) for number in range(module_of(kind).device_count())]


def name_of(device: torch.device) -> str:
    """What its maker calls it."""
    named = getattr(module_of(device), "get_device_name", None)
    return str(device) if named is None else str(named(device))


def active(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the current one of this thread: a thread that asks the runtime for anything while another
    one is current would start that one up, and take memory there."""
    found: AbstractContextManager[Any] = module_of(device).device(device)
    return found


def rng_state(device: torch.device) -> torch.Tensor:
    """Of its default generator."""
    state: torch.Tensor = module_of(device).get_rng_state(device)
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set its default generator."""
    module_of(device).set_rng_state(state, device)


def default_generators() -> tuple[torch.Generator, ...]:
    """Of all accelerators in this process."""
    found = _present()
    return () if found is None else tuple(getattr(module_of(found), "default_generators", ()))


def seeding_functions() -> tuple[tuple[Any, str], ...]:
    """Modules, and names in them of functions that seed or set the default generators of accelerators."""
    return _seeding_functions(_present())


@functools.cache
def _seeding_functions(found: torch.device | None) -> tuple[tuple[Any, str], ...]:
    module = module_of(torch.device("cuda") if found is None else found)
    places = (module, getattr(module, "random", module))
    names = ("manual_seed", "manual_seed_all", "set_rng_state")
    return tuple((place, name) for name in names for place in dict.fromkeys(places) if hasattr(place, name))


def module_of(device: torch.device) -> Any:
    """PyTorch's module for this kind of device. For this package alone."""
    return torch.get_device_module(device)


def _present() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
