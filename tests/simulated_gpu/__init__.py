"""A GPU that is no GPU: PyTorch's CUDA device, or one of another name, simulated on the CPU. See README.md."""

import atexit
import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .build import KINDS, BuildFailed, NoCompiler, Unavailable, build, torch_folder
from .knobs import NUMBERS, SET_ONCE, Knobs, apply, changed
from .library import Library

if TYPE_CHECKING:
    import torch

__all__ = ["BuildFailed", "Knobs", "NoCompiler", "Simulator", "Unavailable", "build", "load"]

PRIVATE_NAME = "simulated"


class Simulator:
    """The device of this process."""

    def __init__(self, library: Library, knobs: Knobs, kind: str) -> None:
        # These need PyTorch, which must not be imported before the device is known.
        from . import clock, counters

        self.kind = "cuda" if kind == "cuda" else PRIVATE_NAME
        self.counters = counters.Counters(library)
        self.clock = clock.Clock(library)
        self._library = library
        if knobs.clock:
            self.clock.set(knobs.clock)

    @contextmanager
    def knobs(self, **values: int) -> Iterator[None]:
        """Set knobs for a while: lag, seed, poison, copy_in, copy_out, workspace, expandable."""
        with changed(self._library, **values):
            yield

    @contextmanager
    def paused(self, stream: "torch.Stream | None" = None) -> Iterator[None]:
        """What is issued to the stream, the current one by default, begins when the block ends.

        A host that waits for it inside gets a RuntimeError.
        """
        import torch

        stream = stream or torch.accelerator.current_stream()
        self._library.pause(stream.device_index, stream.stream_id, True)
        try:
            yield
        finally:
            self._library.pause(stream.device_index, stream.stream_id, False)


@functools.cache
def load(kind: str = "cuda") -> Simulator:
    """Pose as PyTorch's device ``kind``, "cuda" or "privateuse1", in this process, before anything asks for CUDA.

    The knobs come from the environment. Raises NoCompiler; BuildFailed; Unavailable where PyTorch was built with CUDA;
    RuntimeError where it has already looked for it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; there are {', '.join(KINDS)}")
    if kind == "cuda" and (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("this PyTorch was built with CUDA, and only one that was not can have a simulated one")
    knobs = Knobs.from_environment()
    library = Library(build(kind))
    apply(library, knobs, (*SET_ONCE, *NUMBERS))
    if not library.register():
        raise RuntimeError("PyTorch has looked for CUDA before: load the simulated GPU earlier")
    _pose(library, kind)
    # What is queued when the process ends is dropped, and threads no longer run while PyTorch takes itself apart.
    atexit.register(library.stop)
    return Simulator(library, knobs, kind)


def _pose(library: Library, kind: str) -> None:
    import torch

    from .device_module import Functions, storages_of_the_device

    if kind == "cuda":
        storages_of_the_device("cuda")
        found = Functions(library, "cuda").public()
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            for name, value in found.items():
                if module is torch.cuda or hasattr(module, name):
                    setattr(module, name, value)
        # A function of Python: TorchDynamo hashes what it finds in modules, and ctypes' functions cannot be.
        torch._C._cuda_clearCublasWorkspaces = lambda: library.free_workspaces()
        torch.backends.cudnn.is_acceptable = lambda tensor: False  # without a warning that PyTorch was built without it
        return
    torch.utils.rename_privateuse1_backend(PRIVATE_NAME)
    module = types.ModuleType(f"torch.{PRIVATE_NAME}")
    sys.modules[module.__name__] = module
    for name, value in Functions(library, PRIVATE_NAME).public().items():
        setattr(module, name, value)
    torch._register_device_module(PRIVATE_NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
