"""Helpers of the front-ends' tests; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
pytest.importorskip("transformers", reason="the tests of Hugging Face models need transformers")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


@pytest.fixture(autouse=True)
def _fine_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tiny: with the optimizer's state in parts of a megabyte their least budget would be that of an update,
    with room for every tape."""
    from tapestream.optim import parts

    monkeypatch.setattr(parts, "LEAST_PART_NBYTES", 8192)
