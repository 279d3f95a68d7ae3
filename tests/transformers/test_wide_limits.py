"""A Qwen3 whose one weight of embedding and head is most of it trains where plain PyTorch fails: fresh children under
a hard limit."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from qwen_step import qwen

MIB = 2**20
# Freed memory goes back to the system at once, so that a limit on the process is a limit on what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
REST = 64 * MIB  # for the process beside what a budget covers, buffers of matrix products included
# 32 MiB of embedding: with gradient and state 128 MiB, and three times 32 MiB for logits and their loss.
SMALL: dict[str, Any] = {
    "vocabulary": 32768, "width": 256, "layers": 2, "tokens": 256, "chunks": 8, "steps": 3, "threads": 1,
    "dtype": "float32", "master": None, "streamed": True, "allowed": 0, "budget": 0, "tell_least": False, "saved": None,
}  # fmt: skip
# The weight, its gradient and a tenth; with "step" a place as well from which the gradient goes home.
BUDGETS = {"backward": 80 * MIB, "step": 116 * MIB}
# The least budget is 1,444.5 MiB; beside it two threads that multiply matrices of this width take about 70 MiB.
LARGE: dict[str, Any] = {
    "vocabulary": 151_936, "width": 1024, "tokens": 4096, "budget": 1448 * MIB, "allowed": 1536 * MIB,
    "chunks": "auto", "steps": 2, "threads": os.cpu_count(), "update": "backward", "tell_least": True,
}  # fmt: skip


def child(folder: Path, **changes: Any) -> dict[str, Any]:
    (found,) = children(folder, changes)
    return found


def children(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """What jobs have seen, one after the other in one fresh process."""
    arguments = [json.dumps({**SMALL, "folder": str(folder), **job}) for job in jobs]
    command = [sys.executable, str(Path(__file__).with_name("qwen_step.py")), *arguments]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]


@pytest.mark.parametrize("update", ["backward", pytest.param("step", marks=pytest.mark.full)])
def test_a_wide_embedding_trains_under_a_hard_limit_where_plain_pytorch_fails(update: str, tmp_path: Path) -> None:
    allowed = BUDGETS[update] + REST
    plain = {"streamed": False}
    failed, expected = children(tmp_path, {**plain, "chunks": None, "allowed": allowed}, plain)
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    found = child(tmp_path, update=update, budget=BUDGETS[update], allowed=allowed)
    assert "failed" not in found, found
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]


@pytest.mark.full
def test_a_saved_folder_larger_than_the_memory_is_read_and_trained(tmp_path: Path) -> None:
    """153 MB of weights in shards of 20, four times that with gradients and state, where 144 MiB may be taken."""
    deep = {"vocabulary": 1024, "width": 512, "layers": 12, "tokens": 32, "saved": str(tmp_path / "saved")}
    qwen(deep["vocabulary"], deep["width"], deep["layers"]).save_pretrained(deep["saved"], max_shard_size="20MB")
    (home := tmp_path / "home").mkdir()
    budget = 80 * MIB
    plain = {**deep, "streamed": False, "chunks": None}
    failed, expected = children(home, {**plain, "allowed": budget + REST}, plain)
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    found = child(home, **deep, update="backward", budget=budget, chunks=None, allowed=budget + REST)
    assert "failed" not in found, found
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_vocabulary_of_151936_trains_in_one_and_a_half_gibibytes(tmp_path: Path) -> None:
    """The embedding takes 594 MiB, with its gradient and AdamW's state four times that."""
    failed = child(tmp_path, **{**LARGE, "streamed": False, "chunks": None, "tell_least": False})
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    found = child(tmp_path, **LARGE)
    assert "failed" not in found, found
    print(f"least budget {found['least']} B, steps of {found['seconds']} s, resident {found['resident']} B")
    assert found["least"] <= LARGE["budget"]
    losses = [float.fromhex(loss) for loss in found["losses"]]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]
