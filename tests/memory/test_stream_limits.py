"""What a streamed model takes of the machine: fresh children under a hard limit, where plain PyTorch fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20
# Freed memory goes back to the system at once, so that a limit on the process is a limit on what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
BUDGET = 96 * MIB
ALLOWED = BUDGET + 32 * MIB


JOB: dict[str, Any] = {
    "layers": 12, "width": 512, "length": 32, "steps": 3, "update": "step", "budget": BUDGET, "streamed": True,
    "allowed": 0,
}  # fmt: skip


def child(folder: Path, *jobs: dict[str, Any], script: str = "step.py") -> list[dict[str, Any]]:
    """What jobs have seen, one after the other in one fresh process."""
    return run(script, *(json.dumps({**JOB, "folder": str(folder), **job}) for job in jobs))


def run(script: str, *arguments: str) -> list[dict[str, Any]]:
    """What the last lines of a script say, one for each argument."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(arguments) :]]


@pytest.mark.parametrize(
    "update", [pytest.param("step", marks=pytest.mark.full), pytest.param("backward", marks=pytest.mark.full)]
)
def test_training_under_a_hard_limit_where_plain_pytorch_fails(update: str, tmp_path: Path) -> None:
    """150 MB of parameters, 600 MB with gradients and state, in 96 MiB and 32 MiB for the rest of the process."""
    failed, plain = child(tmp_path, {"streamed": False, "allowed": ALLOWED}, {"streamed": False})
    assert plain["resident"] > 4 * BUDGET
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    (found,) = child(tmp_path, {"update": update, "allowed": ALLOWED})
    assert "failed" not in found, found
    assert found["losses"] == plain["losses"]
    assert found["digest"] == plain["digest"]
    assert found["resident"] < ALLOWED
    assert not any(tmp_path.iterdir()), "the folder must go with the process"


def test_clipping_and_states_of_model_and_optimizer_take_no_memory_of_their_size(tmp_path: Path) -> None:
    """Gradients on disk are clipped; 300 MB of states are saved, and loaded again, in the memory of training."""
    (home := tmp_path / "home").mkdir()

    job = {"layers": 8, "saved": str(tmp_path / "saved.pt")}
    plainly = {**job, "streamed": False}
    failed, plain = child(home, {**plainly, "allowed": ALLOWED}, plainly, script="living.py")
    assert plain["seen"][1] == plain["seen"][2], "a step from the states that were saved is that step again"
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    assert child(home, {**job, "allowed": ALLOWED}, script="living.py") == [plain]


def test_a_model_in_memory_goes_to_disk_block_by_block(tmp_path: Path) -> None:
    """151 MB of parameters leave; one block of 12.6 MB is there twice meanwhile."""
    (found,) = run("wrap.py", str(tmp_path))
    assert found["extra"] <= 1.5 * max(found["sizes"])
    assert found["freed"] >= 0.9 * sum(found["sizes"])


SCRIPT = """
import signal, sys, time, torch, tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not
model = ts.stream(GPT(GPTConfig(2, 32, 2, vocabulary=16, context=8)), device="cpu", folder=sys.argv[1])
model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("ending", ["exit", "interrupt", "terminate"])
def test_folders_go_with_the_process(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "0" if ending == "exit" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if ending != "exit":
            time.sleep(0.2)
            process.send_signal(signal.SIGINT if ending == "interrupt" else signal.SIGTERM)
    if ending != "terminate":
        assert not any(tmp_path.iterdir())
        return
    # Nothing can be done at once about a kill; the next run finds what it has left unlocked.
    assert len(list(tmp_path.iterdir())) == 1
