"""The states of all random generators, which go with every save: of one process, or of ranks that save together."""

import hashlib
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from tapestream.accelerator.device import default_device, devices, is_accelerator, rng_state, set_rng_state

OTHERS = "others"
"""Where the states of the other ranks are, in the order of ranks, beside the first one's."""


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


def of_rank(found: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What ``rank`` of so many goes on with: its own state, if as many have saved theirs. Elsewhere the first rank has
    the first one's, and the others new ones, which follow from it and from the number of their rank; a warning says
    so, on every rank."""
    every = [found, *found.get(OTHERS, ())]
    if len(every) != ranks > 1:
        many = f"{len(every)} ranks" if len(every) > 1 else "one process"
        warnings.warn(
            f"a save of {many} is loaded by {ranks} ranks: the first one's random generators go on, those of the "
            "others begin anew, seeded by what the first one's are and the number of the rank",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    if len(every) == ranks or rank == 0:
        return dict(every[rank])
    first = found["torch"].cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(first + rank.to_bytes(8, "little")).digest()[:4], "little")
    kind = default_device()
    cuda = [torch.Generator(one).manual_seed(seed).get_state() for one in devices(kind)] if is_accelerator(kind) else []
    return {
        "torch": torch.Generator("cpu").manual_seed(seed).get_state(),
        "cuda": cuda,
        "python": random.Random(seed).getstate(),
        "numpy": numpy.random.RandomState(seed).get_state(),
    }


def _of_devices(found: Mapping[str, Any]) -> list[tuple[int, torch.Tensor]]:
    """None where it was saved with another number of devices: these go on as they are."""
    kind = default_device()
    same = is_accelerator(kind) and len(found["cuda"]) == len(devices(kind))
    return list(enumerate(found["cuda"])) if same else []
