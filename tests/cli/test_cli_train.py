"""`tapestream train` and `machine`, and how commands end."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.cli.ends import reported
from tapestream.cli.loop import Job
from tapestream.cli.saving import Saver
from tapestream.frontends.saving.folder import Saves
from tapestream.models import GPTConfig

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "2", "--width", "64", "--batch", "1", "--seq", "32", "--device", "cpu"]


def test_training_falls_writes_metrics_and_leaves_no_home_behind(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    metrics, home = tmp_path / "metrics.jsonl", tmp_path / "home"
    options = ["--budget", "8MiB", "--folder", str(home), "--steps", "8", "--rate", "0.003", "--metrics", str(metrics)]
    result = CliRunner().invoke(make_app(), ["train", *SMALL, "--data", str(text), *options])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["planned_peak_nbytes"] <= 8 * 2**20 for line in lines)
    assert lines[-1]["measured_peak_nbytes"] <= 8 * 2**20
    assert f"{lines[-1]['loss']:.3f}" in result.stdout
    gc.collect()  # in a process of its own, its end does this
    assert list(home.iterdir()) == []


def test_a_peak_is_measured_from_the_third_step_on_or_planned(tmp_path: Path) -> None:
    """What a step frees is seen only where the step that made it was metered too."""
    for steps in (2, 3):
        metrics, files = tmp_path / f"{steps}.jsonl", ("--home", "disk", "--folder", str(tmp_path / "home"))
        options = ["--budget", "16MiB", *files, "--steps", str(steps), "--metrics", str(metrics)]
        result = CliRunner().invoke(make_app(), ["train", *SMALL, *options])
        assert result.exit_code == 0, result.output
        peaks = [json.loads(line)["measured_peak_nbytes"] for line in metrics.read_text().splitlines()]
        assert peaks[:2] == [None, None]
        assert all(peak <= 16 * 2**20 for peak in peaks[2:])
        assert [line.count("(measured)") for line in result.stderr.splitlines() if "loss" in line] == [0, 0, 1][:steps]


def test_a_budget_too_small_for_the_model_is_one_line(tmp_path: Path) -> None:
    options = ["--budget", "100kB", "--folder", str(tmp_path), "--metrics", str(tmp_path / "m.jsonl"), "--steps", "1"]
    result = CliRunner().invoke(make_app(), ["train", *SMALL, *options])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_missing_text_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["train", *SMALL, "--data", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no file or folder" in result.stderr


def test_the_machine_is_measured_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["machine", "--device", "cpu", "--folder", str(tmp_path), "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert {(link["source"], link["target"]) for link in document["links"]} == {("disk", "device"), ("device", "disk")}
    assert all(link["bytes_per_second"] > 0 for link in document["links"])
    assert document["flops_per_second"] > 0


def test_the_machine_as_a_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["machine", "--device", "cpu", "--folder", str(tmp_path)])
    assert "disk to RAM" in result.stdout
    assert CliRunner().invoke(make_app(), ["machine", "--folder", str(tmp_path / "no")]).exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_command_with_their_status(number: signal.Signals) -> None:
    app = typer.Typer()

    @app.command()
    @reported
    def waits() -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    listens = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, listens)  # where it is ignored, as behind nohup
    try:
        result = CliRunner().invoke(app, [])
    finally:
        signal.signal(number, before)
    assert result.exit_code == 128 + number
    assert result.stderr.strip() == "stopped"


def test_a_loss_that_becomes_no_number_is_told_at_the_end(tmp_path: Path) -> None:
    options = ["--rate", "1e30", "--steps", "3", "--metrics", str(tmp_path / "m.jsonl")]
    result = CliRunner().invoke(make_app(), ["train", *SMALL, *options])
    assert result.exit_code == 0, result.output
    assert "the loss has not been finite since step 1; is --rate 1e+30 too high?" in result.stderr
    result = CliRunner().invoke(make_app(), ["train", *SMALL, "--steps", "3", *options[4:]])
    assert "not been finite" not in result.stderr


def test_a_network_or_optimizer_that_is_not_known_is_told_at_once(tmp_path: Path) -> None:
    metrics = ["--metrics", str(tmp_path / "m.jsonl")]
    for arguments, told in ((["resnext"], "gpt, resnet or dranet"), (["gpt", *SMALL, "--optimizer", "lion"], "adamw")):
        result = CliRunner().invoke(make_app(), ["train", *arguments, *metrics])
        assert result.exit_code == 2
        assert told in result.stderr
        assert "blocks home" not in result.stderr


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(make_app(), ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("tapestream ")


def test_jobs_survive_json() -> None:
    job = Job(
        GPTConfig(2, 64, 1, vocabulary=256),
        "stdlib",
        1,
        32,
        4,
        1e-3,
        2,
        "adamw",
        "step",
        "cpu",
        "1GiB",
        None,
        "auto",
        None,
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)])
def test_the_rate_rises_and_stays(step: int, rate: float) -> None:
    job = Job(GPTConfig(1, 8, 1), "stdlib", 1, 8, 10, 1.0, 4, "sgd", "step", "cpu", None, None, "auto", None)
    assert job.rate_at(step) == rate


def losses(path: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in map(json.loads, path.read_text().splitlines())]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """A signal saves after the step at hand; with --resume every later loss is that of the run that never stopped."""
    words = ["train", *SMALL, "--steps", "6"]
    home, saves = ("--folder", str(tmp_path / "home")), ("--saves", str(tmp_path / "saves"))
    done = CliRunner().invoke(make_app(), [*words, *home, "--metrics", str(tmp_path / "whole.jsonl")])
    assert done.exit_code == 0, done.output
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-m", "tapestream.cli.app", *words, *home, *saves, "--metrics", str(metrics)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:  # which a signal ends
        while not (metrics.exists() and metrics.read_text()):
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        out = run.stdout.read() if run.stdout else ""
    taken = len(losses(metrics))
    assert taken < 6, "it ended before the signal came"
    assert run.returncode == 128 + signal.SIGTERM
    assert f"stopped and saved after step {taken} of 6; go on with --resume" in out
    other = CliRunner().invoke(make_app(), ["train", *SMALL, *home, *saves, "--resume", "--rate", "0.1"])
    assert other.exit_code == 2
    assert "holds a run with another rate (0.0003 there, 0.1 here); give the same options" in other.stderr
    (weights,) = (tmp_path / "saves").glob("*/model/model.safetensors")
    whole_file = weights.read_bytes()
    weights.write_bytes(whole_file[:-1] + bytes([whole_file[-1] ^ 4]))
    damaged = CliRunner().invoke(make_app(), ["train", *SMALL, *home, *saves, "--resume", "--metrics", str(metrics)])
    assert damaged.exit_code == 2
    assert "have changed; this save cannot be used" in damaged.stderr
    weights.write_bytes(whole_file)
    done = CliRunner().invoke(make_app(), [*words, *home, *saves, "--metrics", str(metrics), "--resume"])
    assert done.exit_code == 0, done.output
    assert losses(metrics) == losses(tmp_path / "whole.jsonl")


def test_resuming_needs_a_save(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["train", *SMALL, "--resume"])
    assert result.exit_code == 2
    assert "--resume was asked for without --saves" in result.stderr
    result = CliRunner().invoke(make_app(), ["train", *SMALL, "--resume", "--saves", str(tmp_path)])
    assert result.exit_code == 2
    assert "no complete save" in result.stderr


@pytest.mark.parametrize("moment", ["after a step", "while room is looked for", "while a save is written"])
def test_a_run_stops_with_all_its_steps_saved_whenever_the_signal_comes(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPTConfig(2, 64, 2, context=32)
    job = Job(config, "", 1, 8, 6, 0.1, 1, "adamw", "step", "cpu", None, None, "auto", None)
    taken, sent, check = 0, False, Saves.check_room

    def signalled(now: str) -> None:
        nonlocal sent
        if now == moment and taken and not sent:
            sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def look(*args: Any) -> None:
        signalled("while room is looked for")
        check(*args)

    class Steps:
        def state_dict(self) -> dict[str, int]:
            signalled("while a save is written")
            return {"taken": taken}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    monkeypatch.setattr(Saves, "check_room", look)
    saver = Saver(tmp_path, 2, job)
    saver.holds({"steps": Steps()}, lambda *_: None, load=False)
    with saver.listening():
        for taken in range(1, 7):
            signalled("after a step")
            if not saver.after(taken, last=taken == 6):
                break
    assert sent
    assert taken < 6
    assert ts.load(tmp_path)["step"] == taken


def test_ctrl_c_during_the_import_is_one_line_too(tmp_path: Path) -> None:
    """The console script's entry point, before a package that presses Ctrl-C and has begun something."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["tapestream"].partition(":")
    (tmp_path / "tapestream").mkdir()
    (tmp_path / "tapestream" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    print('went on')\n"
        "except KeyboardInterrupt:\n    raise ImportError('torch failed to import')\n"
    )
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT / 'src')]}; import {module} as m; m.{function}()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "stopped\n")


def test_the_console_script_is_the_command() -> None:
    code = "import sys; from tapestream_command import main; sys.argv = ['tapestream', '--version']; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stdout.split()[0], found.stderr) == (0, "tapestream", "")
