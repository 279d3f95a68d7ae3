"""`tapestream demo`: the whole of it once, small, and that Ctrl-C leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tapestream.cli.app import make_app
from tapestream.cli.demo import _job, check_budget, plain_nbytes
from tapestream.cli.loop import Job
from tapestream.errors import BudgetError
from tapestream.models import GPTConfig

COMMAND = [sys.executable, "-m", "tapestream.cli.app", "demo", "--quick", "--device", "cpu"]


@pytest.mark.full
def test_the_quick_demo_trains_where_plain_pytorch_fails_and_gives_its_bits(tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed, as expected" in result.stdout
    assert "every bit" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["measured_peak_nbytes"] <= 96 * 2**20
    assert not (tmp_path / "home").exists()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_ctrl_c_removes_the_home_and_the_child(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    home = tmp_path / "home"
    deadline = time.monotonic() + 120
    while not any(home.glob("*/extent-*")):
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(demo.pid, signal.SIGINT)
    _, complaint = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in complaint
    assert not home.exists()


def test_a_home_with_somebody_elses_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").write_text("keep me")
    result = CliRunner().invoke(make_app(), ["demo", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert (tmp_path / "home" / "mine").read_text() == "keep me"


@pytest.mark.parametrize("budget", ["1MiB", "24MiB"])
def test_the_least_budget_is_told_before_any_child_starts(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapestream.cli.demo.child", lambda *_, **__: pytest.fail("a child was started"))
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--budget", budget]
    result = CliRunner().invoke(make_app(), ["demo", *options])
    assert result.exit_code == 2
    said = re.match(rf"--budget {budget} was asked for; the demo's model needs at least (\d+)MiB", result.stderr)
    assert said, result.stderr
    least = int(said[1])
    check_budget(_job(True, "cpu", f"{least}MiB", tmp_path))
    with pytest.raises(BudgetError):
        check_budget(_job(True, "cpu", f"{least - 1}MiB", tmp_path))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_the_budgets_that_are_taken_by_default_suffice(device: str, quick: bool, tmp_path: Path) -> None:
    check_budget(_job(quick, device, None, tmp_path))


def test_what_plain_pytorch_needs_is_at_least_parameters_gradients_and_adams_state() -> None:
    config = GPTConfig(4, 128, 2, vocabulary=256, context=64)
    job = Job(config, "stdlib", 1, 64, 1, 1e-3, 1, "adamw", "step", "cpu", None, None, "auto", None)
    assert 16 * config.parameters < plain_nbytes(job) < 2 * 16 * config.parameters
