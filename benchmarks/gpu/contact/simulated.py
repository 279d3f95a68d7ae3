"""The one place that knows the simulated GPU of ``tests/simulated_gpu``."""

import sys
from importlib import import_module

from benchmarks.gpu.contact.children import ROOT

PATH = ROOT / "tests"
PLUGIN = "simulated_gpu.plugin"
"""Of pytest: loads the device before any test is collected."""


def load() -> None:
    """Make this process's ``torch.cuda`` a simulated device; before anything has asked for CUDA."""
    sys.path.insert(0, str(PATH))
    import_module("simulated_gpu").load()
