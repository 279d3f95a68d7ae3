"""What tests of several folders share."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries the same examples every time, so that what fails is due to the change; `make test-full` others
    each time."""
    settings.register_profile("the same examples", derandomize=True)
    if config.getoption("markexpr") == "not full":
        settings.load_profile("the same examples")


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
