"""What tests of several folders share."""

import gc
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries the same examples every time, so that what fails is due to the change; `make test-full` others
    each time. No example fails for the time that it takes: machines are shared."""
    settings.register_profile("unhurried", deadline=None)
    settings.register_profile("the same examples", derandomize=True, deadline=None)
    settings.load_profile("the same examples" if config.getoption("markexpr") == "not full" else "unhurried")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what is `thinned`, about one case of n is run each time, spread over all parameters; the first, whatever its
    name."""
    begun = set[str]()
    for item in items:
        marker, function = item.get_closest_marker("thinned"), item.nodeid.partition("[")[0]
        if marker is not None and function in begun and zlib.crc32(item.nodeid.encode()) % marker.args[0]:
            item.add_marker(pytest.mark.full)
        begun.add(function)


def pytest_collection_finish() -> None:
    _settle()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _settle()


def _settle() -> None:
    """Thousands of tests, what they import, and what PyTorch builds up while they run are here to stay: of a million
    objects a collection takes a fifth of a second, and tests collect, or count all tensors, hundreds of times."""
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
