"""A model that fits neither the GPU nor RAM trains from the disk, in fresh processes that may take no more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEVICE, HOST, ALLOWED = 16 << 20, 48 << 20, 190 << 20
GPU = 32 << 20  # what the device has: pieces of its memory are larger than what is asked for


def child(*words: object, memory: int) -> tuple[int, str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH")))),
        "SIMULATED_GPU_MEMORY": str(memory), "SIMULATED_GPU_EXPANDABLE": "1",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "three_tiers.py"), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.skipif("simulated_gpu" not in sys.modules, reason="a real GPU's memory cannot be limited to so little")
def test_three_tiers_hold_what_one_cannot_and_move_what_was_planned(tmp_path: Path) -> None:
    status, told = child("plain", memory=GPU)
    assert (status, "OutOfMemoryError" in told) == (1, True)
    status, told = child("plain", memory=1 << 30)
    assert status == 0, told
    plain: dict[str, Any] = json.loads(told)
    status, told = child(DEVICE, HOST, ALLOWED, tmp_path, memory=GPU)
    assert status == 0, told
    ours: dict[str, Any] = json.loads(told)
    assert 4 * ours["nbytes"] > 3 * (DEVICE + HOST)  # weights, gradients, and AdamW's state
    assert (ours["losses"], ours["digest"]) == (plain["losses"], plain["digest"])
    assert ours["moved"] == ours["planned"]
    assert set(ours["moved"]) == {"HOST to DISK", "DISK to HOST", "HOST to DEVICE", "DEVICE to HOST"}
    assert ours["allocated"] <= DEVICE
    assert ours["held"]["HOST"] <= HOST
    assert ours["held"]["DISK"] > 2 * ours["nbytes"]
