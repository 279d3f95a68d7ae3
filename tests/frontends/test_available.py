"""RAM that is there for this process: limits of its own count, and where little is left the heap is kept lean."""

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from streamable import MODELS
from streaming import streamed

from tapestream.costs import Budget
from tapestream.frontends.available import host_nbytes
from tapestream.frontends.module.homes import homes
from tapestream.ir.actions import Tier
from tapestream.ir.homes import home_tiers
from tapestream.storage import heap


@pytest.mark.parametrize("which", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_of_the_process_is_all_that_there_is(which: str) -> None:
    number, taken = getattr(resource, which), psutil.Process().memory_info()
    used = taken.data if which == "RLIMIT_DATA" else taken.vms
    soft, hard = resource.getrlimit(number)
    allowed = used + (64 << 20)
    if host_nbytes() < 128 << 20:
        pytest.skip("so little is left that the limit would not bind")
    try:
        resource.setrlimit(number, (allowed, hard))
        found = host_nbytes()
    finally:
        resource.setrlimit(number, (soft, hard))
    assert 32 << 20 <= found <= 64 << 20
    assert host_nbytes() > found


@pytest.mark.parametrize(
    ("home", "free", "kept"),
    [("disk", 2**34, True), ("disk", 2**27, False), ("device", 2**27, True)],
)
def test_freed_memory_goes_back_at_once_only_where_ram_is_scarce(
    home: str, free: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thresholds while training: as much as the budget at hand, or nothing; afterwards those of any program."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_adjustable", lambda: True)
    monkeypatch.setattr(heap, "_set", lambda *thresholds: seen.append(thresholds))
    monkeypatch.setattr(homes, "host_nbytes", lambda: free)
    budget, knobs = 100 << 20, dict[str, Any](folder=tmp_path) if home == "disk" else {}
    with streamed(MODELS["gpt"], budget, device="cpu", home=home, **knobs):
        assert seen[-1] == ((budget, 32 << 20) if kept else (65536, 65536))
    assert seen[-1] == (64 << 20, 32 << 20)


def test_beside_another_device_ram_is_never_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "host_nbytes", lambda: 0)
    disk = home_tiers(Tier.DISK)
    assert homes._lean(torch.device("cpu"), disk, Budget("1 GiB"))
    assert not homes._lean(torch.device("cuda"), disk, Budget("1 GiB"))
