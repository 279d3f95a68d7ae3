"""`tapestream train --saves`: one run at a time in a folder."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app

SMALL = ["resnet", "--layers", "8", "--width", "8", "--device", "cpu"]


def train(tmp_path: Path, *options: str) -> Any:
    return CliRunner().invoke(make_app(), ["train", *SMALL, "--metrics", str(tmp_path / "metrics.jsonl"), *options])


def test_two_runs_do_not_save_in_one_folder_and_a_killed_one_is_in_nobodys_way(tmp_path: Path) -> None:
    """Not even while its workers are still there: they are told of its end a little later."""
    saves = tmp_path / "saves"
    options = [*SMALL, "--steps", "50000", "--save-every", "1", "--workers", "1", "--saves", str(saves)]
    command = [
        sys.executable,
        "-m",
        "tapestream.cli.app",
        "train",
        *options,
        "--metrics",
        str(tmp_path / "metrics.jsonl"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            while not list(saves.glob("0*/manifest.json")):
                assert run.poll() is None
                time.sleep(0.01)
            for resume in ((), ("--resume",)):
                other = train(tmp_path, "--saves", str(saves), *resume)
                assert other.exit_code == 2
                assert f"saves is in use by another run (process {run.pid}); wait for its end" in other.stderr
        finally:
            run.kill()
    done = ts.load(saves)["step"]
    found = train(tmp_path, "--saves", str(saves), "--resume", "--steps", str(done + 1))
    assert found.exit_code == 0, found.stderr
    assert ts.load(saves)["step"] == done + 1
    assert not (saves / ".running").exists()
