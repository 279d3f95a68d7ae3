"""Helpers of the front-ends' tests; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
pytest.importorskip("transformers", reason="the tests of Hugging Face models need transformers")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""
