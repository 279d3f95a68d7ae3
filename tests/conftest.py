"""What tests of several folders share."""

import gc
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import are here to stay: collections need not look through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The sums of parallel kernels are made in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
