"""`python -m pytest -p simulated_gpu.plugin`: tests that need a GPU run on the simulated one."""

from collections.abc import Iterator

import pytest

from . import Simulator, Unavailable, load


def _loaded() -> Simulator | str:
    try:
        return load()
    except Unavailable as error:
        return str(error)


_ONE_IN = 6
_DEVICE = _loaded()  # before any test module imports PyTorch


def pytest_report_header() -> str:
    return "GPU: simulated" if isinstance(_DEVICE, Simulator) else f"GPU: none; {_DEVICE}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where no GPU can be simulated nothing runs, and says so. Of tests that know nothing of a GPU one in several runs
    in CI, and none of those that need what only the CPU has."""
    if isinstance(_DEVICE, str):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_DEVICE))
    ours = [item for item in items if _knows_of_a_gpu(item)]
    others = [item for item in items if not _knows_of_a_gpu(item) and not item.get_closest_marker("on_cpu")]
    if config.getoption("markexpr") == "not full":
        others = [item for item in others if not item.get_closest_marker("full")][::_ONE_IN]
    config.hook.pytest_deselected(items=list({*items} - {*ours, *others}))
    items[:] = [*ours, *others]


def _knows_of_a_gpu(item: pytest.Item) -> bool:
    return not {"gpu", "simulated_gpu"}.isdisjoint(item.path.parts)


@pytest.fixture(autouse=True)
def _tensors_of_tests_lie_there(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that know nothing of a GPU make their tensors on it."""
    if _knows_of_a_gpu(request.node):
        yield
        return
    import torch

    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def simulator() -> Simulator:
    """The device: its counters, knobs and clock."""
    assert isinstance(_DEVICE, Simulator)
    return _DEVICE
