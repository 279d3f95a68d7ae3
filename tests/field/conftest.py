"""What users brought from the field: one file per kind of fault, each with other inputs of that kind.

Each test is plain PyTorch's bits within the budget, or a refusal by name whose advice is followed. Models and helpers
are those of the front-ends' tests.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The sums of parallel kernels are made in one order."""
