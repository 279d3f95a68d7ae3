"""The batch script for SLURM, under commands that stand in for it: a job that is ended goes on, on fewer ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    "srun": 'exec "$@"',
    "scontrol": "echo 127.0.0.1",
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def job(folder: Path, ranks: int, until: int) -> "subprocess.Popen[str]":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slurm = {
        "SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": str(ranks), "SLURM_JOB_ID": "7",
        "PORT": str(port), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    sizes = ["--layers", "3", "--width", "64", "--seq", "32", "--budget", "1900KiB", "--until", str(until)]
    return subprocess.Popen(
        ["bash", "examples/slurm.sbatch", *sizes], cwd=folder, env=os.environ | slurm, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.on_cpu("c10d knows no simulated GPU")
def test_a_job_that_is_ended_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name, line in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    with job(tmp_path, 2, 1000) as first:
        assert first.stdout is not None
        lines = iter(first.stdout.readline, "")
        assert any(line.startswith("step 2/1000 ") for line in lines)
        os.killpg(first.pid, signal.SIGTERM)
        done = max(int(found[1]) for line in ["step 2/", *lines] if (found := re.match(r"step (\d+)/", line)))
    assert [path.name for path in (tmp_path / "runs/torchrun/state").iterdir()] == ["000001"]
    with job(tmp_path, 1, done + 1) as second:
        said, _ = second.communicate(timeout=120)
    assert re.findall(r"step (\d+)/", said) == [str(done + 1)]
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs/torchrun/state/000002/model")
