"""How fast an optimizer's rule goes over the bytes that it reads and writes, measured on tensors of its own."""

from collections.abc import Mapping
from typing import Any

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.streams import timed
from tapestream.optim.state import OptimizerClass

_MOST = 2**19  # elements: a few times what a core's own cache holds


def bytes_per_second(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float | None:
    """Bytes that a step on a tensor of so many elements reads and writes per second: parameter and state twice,
    gradient once.

    ``options``, ``required``: as for `tapestream.optim.state.probe`. Takes the memory of half a million elements, or
    of ``elements`` if those are fewer, with gradient and state. None where the optimizer does not take such a tensor.
    """
    with torch.random.fork_rng(devices=[device] if is_accelerator(device) else [], device_type=device.type):
        try:
            parameter = torch.nn.Parameter(torch.zeros(1, min(elements, _MOST), dtype=dtype, device=device))
            parameter.grad = torch.zeros_like(parameter)
            optimizer = cls([{**options, "params": [parameter]}], **required)
            optimizer.step()  # makes the state
            seconds = min(timed(device, optimizer.step)[0] for _ in range(2))
        except Exception:
            return None
    state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, torch.Tensor)]
    return (3 * parameter.nbytes + 2 * sum(t.nbytes for t in state)) / seconds
