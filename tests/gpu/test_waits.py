"""Every wait that the library asks of an accelerator is needed: without it, some small run goes wrong."""

import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("slow copies and paused streams are those of the simulated GPU", allow_module_level=True)

from hazards_of_waits import HAZARDS, Hazard
from simulated_gpu import Simulator
from waits import Wait, every_wait, is_for_updates, without


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    """What goes wrong leaves warnings behind; the device has done with it before the next test."""
    with warnings.catch_warnings(action="ignore"):
        yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
def test_nothing_goes_wrong_with_all_waits(simulator: Simulator, hazard: Hazard) -> None:
    assert hazard(simulator) == []


@pytest.mark.parametrize("wait", [wait for wait in every_wait() if not is_for_updates(wait)], ids=str)
def test_something_goes_wrong_without(simulator: Simulator, wait: Wait) -> None:
    with without(wait):
        assert any(_goes_wrong(hazard, simulator) for hazard in HAZARDS), f"nobody needs {wait} (line {wait.line})"


def _goes_wrong(hazard: Hazard, simulator: Simulator) -> bool:
    try:
        return bool(hazard(simulator))
    except Exception:  # what was read too early may be anything, and so may be what it leads to
        return True


def test_waits_are_found() -> None:
    """The finder has not gone blind: these are the ones that every run rests on."""
    found = {wait.function for wait in every_wait()}
    assert {"TorchStreams.wait", "CudaEngine._start_on_stream", "BlockCopies.hand_over", "settle_uses"} <= found
