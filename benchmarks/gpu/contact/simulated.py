"""The one place that knows the simulated GPU of ``tests/simulated_gpu``."""

import sys
from importlib import import_module
from typing import Any

from benchmarks.gpu.contact.children import ROOT

PATH = ROOT / "tests"
PLUGIN = "simulated_gpu.plugin"
"""Of pytest: loads the device before any test is collected."""


def build() -> None:
    """Compile it where that was not done before. Raises RuntimeError where there is no compiler, in a sentence."""
    _package().build()


def load() -> None:
    """Make this process's ``torch.cuda`` a simulated device; before anything has asked for CUDA."""
    _package().load()


def _package() -> Any:
    sys.path.insert(0, str(PATH))
    return import_module("simulated_gpu")
