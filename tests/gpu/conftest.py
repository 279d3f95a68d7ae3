"""Models and helpers are those of the front-ends' tests; the kernels are deterministic ones where there are any."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
# cuBLAS reads it when CUDA starts; without it every product warns that it may not be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels that exist in no deterministic form warn, and warnings are errors: both sides run the same ones."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
