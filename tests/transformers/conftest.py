"""Helpers of the front-ends' tests; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
pytest.importorskip("transformers", reason="the tests of Hugging Face models need transformers")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
