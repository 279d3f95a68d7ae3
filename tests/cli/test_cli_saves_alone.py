"""`tapestream train --saves`: one run at a time in a folder, and in a file of metrics; signals before it begins."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.cli.loop import streamed

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


def test_a_run_does_not_go_on_in_the_metrics_of_another(tmp_path: Path) -> None:
    """Which has begun in the file of the first, and so has emptied it."""
    first, other, metrics = tmp_path / "first", tmp_path / "other", tmp_path / "metrics.jsonl"
    assert train(tmp_path, "--saves", str(first), "--steps", "2").exit_code == 0
    lines = metrics.read_text()
    assert train(tmp_path, "--saves", str(other), "--steps", "3").exit_code == 0
    there = metrics.read_text()
    resume = ("--saves", str(first), "--resume", "--steps", "3")
    refused = train(tmp_path, *resume)
    assert refused.exit_code == 2
    assert f"does not hold step 1 of the run in {first}" in " ".join(refused.stderr.split())
    assert "moving" not in refused.stderr
    assert metrics.read_text() == there
    for before in (lines + there.splitlines()[2] + "\n", ""):  # with a step after the save; a new file
        metrics.write_text(before)
        shutil.rmtree(other)
        shutil.copytree(first, other)
        found = train(tmp_path, "--saves", str(other), "--resume", "--steps", "3")
        assert found.exit_code == 0, found.stderr
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == ([0, 1, 2] if before else [2])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_training_leaves_no_home(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 saves after the first step and goes on; those that stop do so at once."""
    home, saves = tmp_path / "home", tmp_path / "saves"

    def made(*args: Any) -> Any:
        found = streamed(*args)
        assert list(home.iterdir()) != []
        os.kill(os.getpid(), number)
        return found

    monkeypatch.setattr("tapestream.cli.train.streamed", made)
    before = signal.signal(signal.SIGUSR1, pytest.fail)  # it would end this process
    try:
        where = ("--budget", "2MiB", "--home", "disk", "--folder", str(home), "--saves", str(saves))
        status = train(tmp_path, *where, "--steps", "2").exit_code  # the rest refers to the model
    finally:
        signal.signal(signal.SIGUSR1, before)
    gc.collect()
    assert list(home.iterdir()) == []
    if number == signal.SIGUSR1:
        assert status == 0
        assert [ts.load(path)["step"] for path in sorted(saves.glob("0*"))] == [1, 2]
    else:
        assert status == 128 + number
        assert list(saves.iterdir()) == []
