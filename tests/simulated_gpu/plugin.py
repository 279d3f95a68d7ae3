"""`python -m pytest -p simulated_gpu.plugin`: tests that need a GPU run on the simulated one."""

import pytest

from . import Simulator, Unavailable, load


def _loaded() -> Simulator | str:
    try:
        return load()
    except Unavailable as error:
        return str(error)


_DEVICE = _loaded()  # before any test module imports PyTorch


def pytest_report_header() -> str:
    return "GPU: simulated" if isinstance(_DEVICE, Simulator) else f"GPU: none; {_DEVICE}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where no GPU can be simulated nothing runs, and says so."""
    if isinstance(_DEVICE, str):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_DEVICE))


@pytest.fixture
def simulator() -> Simulator:
    """The device: its counters, knobs and clock."""
    assert isinstance(_DEVICE, Simulator)
    return _DEVICE
