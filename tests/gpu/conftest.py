"""Models and helpers are those of the front-ends' tests; the kernels are deterministic ones where there are any."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
# cuBLAS reads it when CUDA starts; without it every product warns that it may not be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels that exist in no deterministic form warn, and warnings are errors: both sides run the same ones."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))


@pytest.fixture(autouse=True)
def _exact_kernels() -> Iterator[None]:
    """Some kernels add in the order in which threads arrive unless they are told not to."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def clock(simulator: Any) -> Iterator[Any]:
    """The virtual clock of the simulated GPU, which tests set to a card's. Nothing is collected meanwhile."""
    torch.cuda.synchronize()
    gc.disable()
    yield simulator.clock
    gc.enable()
    simulator.clock.off()
