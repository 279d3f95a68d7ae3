"""The states of all random generators, which go with every save."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from tapestream.accelerator.device import default_device, devices, is_accelerator, rng_state, set_rng_state


def states() -> dict[str, Any]:
    """As they are now."""
    kind = default_device()
    cuda = [rng_state(one) for one in devices(kind)] if is_accelerator(kind) else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def check_states(found: Mapping[str, Any]) -> None:
    """Set generators that nobody uses, which raises what setting the real ones would."""
    torch.Generator().set_state(found["torch"])
    for number, state in _of_devices(found):
        torch.Generator(torch.device(default_device().type, number)).set_state(state)
    random.Random().setstate(found["python"])
    kind = type(numpy.random.get_bit_generator())  # type: ignore[attr-defined]
    numpy.random.RandomState(kind()).set_state(found["numpy"])


def set_states(found: Mapping[str, Any]) -> None:
    """As they were."""
    torch.set_rng_state(found["torch"].clone())
    for number, state in _of_devices(found):
        set_rng_state(state.clone(), torch.device(default_device().type, number))
    random.setstate(found["python"])
    numpy.random.set_state(found["numpy"])


def _of_devices(found: Mapping[str, Any]) -> list[tuple[int, torch.Tensor]]:
    """None where it was saved with another number of devices: these go on as they are."""
    kind = default_device()
    same = is_accelerator(kind) and len(found["cuda"]) == len(devices(kind))
    return list(enumerate(found["cuda"])) if same else []
