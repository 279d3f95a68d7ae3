"""Helpers of the front-ends' tests; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
pytest.importorskip("transformers", reason="the tests of Hugging Face models need transformers")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


UPDATES_COUNT_MOST = ("whisper", "resnet-train-bfloat16", "encoder output in the loss")
"""Families whose least budget would be that of an update, with room for every tape."""


@pytest.fixture(autouse=True)
def _fine_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the optimizer's state is in parts of less than a megabyte: these models are tiny."""
    from tapestream.optim import parts

    name = request.node.name.lower()
    if "tight" in name and any(words in name for words in UPDATES_COUNT_MOST):
        monkeypatch.setattr(parts, "LEAST_PART_NBYTES", 8192)
