"""The examples run in this process, small; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
pytest.importorskip("transformers", reason="the examples need transformers")
pytest.importorskip("peft", reason="the examples need peft")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""
