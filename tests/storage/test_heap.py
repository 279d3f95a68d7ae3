"""What the C library's heap gives back: measured in children, for a heap is its process's."""

import json
import os
import platform
import subprocess
import sys

import pytest

from tapestream.storage import heap

SCRIPT = """
import json, sys
import torch
from tapestream.storage.heap import free_at_once, keep_freed

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

torch.ones(1 << 22)  # 16 MiB, freed: what is smaller shares the heap from now on
before = held()
if sys.argv[1] == "inside":
    free_at_once()
pairs = [(torch.ones(1 << 18), torch.ones(1 << 12)) for _ in range(200)]
small = [pair[1] for pair in pairs]
del pairs
inside = held() - before
if sys.argv[1] == "inside":
    keep_freed()
# Memory for the next tensor: the same as before, without the system's help.
taken = held()
tensor = torch.ones(1 << 22)
del tensor
kept = held() - taken
keep_freed(400 << 20)
pairs = [torch.ones(1 << 20) for _ in range(50)]
del pairs
print(json.dumps({"held": inside, "kept": kept, "more": held() - taken}))
"""


def child(where: str, **environment: str) -> dict[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", SCRIPT, where]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_at_once_and_afterwards_is_used_again() -> None:
    """200 MiB are freed from under small tensors that stay."""
    without, inside = child("outside"), child("inside")
    assert without["held"] > 150
    assert inside["held"] < 20
    assert inside["kept"] > 10, "afterwards freed memory stays at hand"
    assert inside["more"] > 150, "as much of it as was asked for"


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_thresholds_of_the_environment_are_the_users(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "glibc.malloc.trim_threshold=1000000" if name == "GLIBC_TUNABLES" else "1000000"
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(heap, "_set", lambda *thresholds: pytest.fail(f"set to {thresholds}"))
    heap.free_at_once()
    heap.keep_freed()


@pytest.mark.parametrize(
    ("nbytes", "free", "found"),
    [(None, 2**40, True), (2**30, 2**32, False), (2**30, 2**32 - 1, True), (2**30, 0, True)],
)
def test_ram_is_scarce_below_four_times_the_budget(nbytes: int | None, free: int, found: bool) -> None:
    assert heap.scarce(nbytes, free) is found


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(heap, "_set", lambda *thresholds: pytest.fail(f"set to {thresholds}"))
    heap.free_at_once()
    heap.keep_freed()
