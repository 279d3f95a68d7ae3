"""Copy engines behind one protocol: `threads`, `cuda`, and for tests `adversarial` and `fake_streams`."""

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError
from tapestream.executor.engines.adversarial import AdversarialEngine
from tapestream.executor.engines.cuda import CudaEngine
from tapestream.executor.engines.fake_streams import FakeStreams
from tapestream.executor.engines.protocol import CopyEngine, EngineStatistics, Lane, Ticket
from tapestream.executor.engines.streams import TorchStreams
from tapestream.executor.engines.threads import ThreadsEngine

__all__ = ["ENGINES", "CopyEngine", "EngineStatistics", "Lane", "Ticket", "make_engine"]

ENGINES = ("auto", "threads", "cuda", "adversarial", "fake_streams")
"""Names that `make_engine` knows."""


def make_engine(name: str, device: torch.device) -> CopyEngine:
    """A copy engine for tensors of ``device``: "auto", "threads", "cuda", "adversarial" or "fake_streams".

    "auto" is "cuda" on an accelerator, whatever its kind, and "threads" on the CPU. Raises InputError for an unknown
    name or one that does not serve the device.
    """
    on_cuda = is_accelerator(device)
    match name:
        case "auto":
            return make_engine("cuda" if on_cuda else "threads", device)
        case "adversarial":
            return AdversarialEngine()
        case "cuda" if on_cuda:
            return CudaEngine(TorchStreams(device))
        case "threads" if not on_cuda:
            return ThreadsEngine()
        case "fake_streams" if not on_cuda:
            return CudaEngine(FakeStreams(), name="fake_streams")
        case "cuda" | "threads" | "fake_streams":
            raise InputError(f"the copy engine {name!r} does not support the device {device}; use engine='auto'")
        case _:
            raise InputError(f"no copy engine is named {name!r}; there are {', '.join(map(repr, ENGINES))}")
