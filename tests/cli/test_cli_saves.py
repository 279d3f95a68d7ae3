"""`tapestream train --saves`: what ends a run loses nothing, and no run takes the place of another."""

import errno
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from thinned import one_in
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.cli.train import keep_steps, writing
from tapestream.frontends.saving.folder import Saves
from tapestream.models import GPTConfig, ImageBatches, MaskFolders, Shapes

cli_train = sys.modules["tapestream.cli.train"]
SMALL = ["--layers", "2", "--width", "64", "--batch", "1", "--seq", "32", "--device", "cpu", "--budget", "8MiB"]


def line(step: int) -> str:
    """What says the least of a step in a file of metrics."""
    return json.dumps({"step": step, "loss": 1.0, "planned_peak_nbytes": 1}) + "\n"


def train(tmp_path: Path, *options: str) -> Any:
    files = ["--folder", str(tmp_path / "home"), "--metrics", str(tmp_path / "metrics.jsonl")]
    return CliRunner().invoke(make_app(), ["train", *options, *files])


def wrong_mask(folder: Path) -> None:
    """An image and its mask, of label 9."""
    image = pytest.importorskip("PIL.Image")
    for name, pixels in (("images", numpy.zeros((16, 16, 3))), ("masks", numpy.full((16, 16), 9))):
        (folder / name).mkdir()
        image.fromarray(pixels.astype(numpy.uint8)).save(folder / name / "x.png")


def test_a_new_run_does_not_push_out_the_saves_of_another(tmp_path: Path) -> None:
    saves = ("--saves", str(tmp_path / "saves"))
    assert train(tmp_path, *SMALL, "--steps", "2", *saves).exit_code == 0
    lines = (tmp_path / "metrics.jsonl").read_text()
    before, homes = sorted((tmp_path / "saves").rglob("*")), set((tmp_path / "home").iterdir())
    for options, said in (
        ((), "holds saves of an earlier run, the last of them 000001"),
        (
            ("--width", "128", "--resume"),
            "holds a run with another config: width (64 there, 128 here); give the same options",
        ),
        (("--steps", "2", "--resume"), "holds a run of 2 steps already"),
    ):
        found = train(tmp_path, *SMALL, *saves, *options)
        assert found.exit_code == 2
        assert said in found.stderr
        assert set((tmp_path / "home").iterdir()) <= homes  # told before the model is made
    assert sorted((tmp_path / "saves").rglob("*")) == before
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_what_fails_before_the_first_step_leaves_earlier_metrics(tmp_path: Path) -> None:
    wrong_mask(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line(0))
    size = ("--layers", "35", "--width", "4", "--size", "16", "--batch", "1", "--device", "cpu", "--steps", "1")
    wrong = train(tmp_path, "dranet", *size, "--data", str(tmp_path), "--classes", "6")
    assert wrong.exit_code == 2
    assert "x.png holds the label 9, but there are 6 classes" in wrong.stderr
    small = train(tmp_path, *SMALL[:-1], "100kB", "--steps", "1")
    assert small.exit_code == 2
    assert (tmp_path / "metrics.jsonl").read_text() == line(0)


def test_where_no_save_can_be_made_is_told_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be made, and a disk with room for the parameters, not for what the optimizer keeps."""
    (tmp_path / "file").write_text("")
    found = train(tmp_path, *SMALL, "--steps", "9", "--saves", str(tmp_path / "file" / "saves"))
    assert found.exit_code == 2
    assert "could not save in" in found.stderr
    assert "training" not in found.stderr
    parameters = 4 * GPTConfig(2, 64, 1, vocabulary=256, context=32).parameters
    for room, steps in ((parameters - 1, 0), (parameters + 100_000, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: namedtuple("Usage", "free")(room))
        found = train(tmp_path, *SMALL, "--steps", "9", "--saves", str(tmp_path / "saves"))
        assert found.exit_code == 2
        assert f"{room} bytes are free on this disk" in found.stderr
        assert found.stderr.count("training") == steps
    for every, at_once in ((3, 3), (5, 2)):  # one that is made, two that stay
        room = at_once * parameters - 1
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: namedtuple("Usage", "free")(room))
        every_few = ("--steps", "9", "--save-every", str(every), "--saves", str(tmp_path / "saves"))
        found = train(tmp_path, *SMALL, *every_few)
        assert found.exit_code == 2
        assert f"{at_once} saves, as many as there will be at once" in " ".join(found.stderr.split())
        assert "training" not in found.stderr
    assert list((tmp_path / "saves").iterdir()) == []


def test_metrics_of_steps_that_are_taken_again_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(5)) + '{"st')
    for first, left in ((5, 5), (3, 3), (7, 3), (0, 0)):
        with writing(path, append=True) as lines:
            keep_steps(lines, first)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(left))


STRANGERS = (
    b"my thesis\n" * 3,
    b"no newline",
    b'{"step": 3, "reward": 1.5}\n',
    b"[1, 2]\n",
    line(0).encode() + b"and a remark\n",
    b"\n",
    bytes(range(256)),
    b'{"step"' * 20_000,
)


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("there", "resume"), one_in(2, itertools.product(STRANGERS, [True, False])))
def test_a_file_that_is_none_of_metrics_stays(resume: bool, there: bytes, tmp_path: Path) -> None:
    """Told before anything runs."""
    options = (*SMALL, "--steps", "2", "--saves", str(tmp_path / "saves"))
    if resume:
        assert train(tmp_path, *SMALL, "--steps", "1", "--saves", str(tmp_path / "saves")).exit_code == 0
        options = (*options, "--resume")
        (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_bytes(there)
    found = train(tmp_path, *options)
    assert found.exit_code == 2
    assert "is no metrics file" in " ".join(found.stderr.split())
    assert "moving" not in found.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes() == there


def test_metrics_of_a_run_before_make_way_and_are_kept(tmp_path: Path) -> None:
    kept: list[str] = []
    for there in ("", '{"st', line(0) + line(1), line(0) + '{"step": 1, "lo'):
        (tmp_path / "metrics.jsonl").write_text(there)
        found = train(tmp_path, *SMALL, "--steps", "1")
        assert found.exit_code == 0
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        kept += [there] * ("\n" in there)
        assert [path.read_text() for path in sorted(tmp_path.glob("metrics-*.jsonl"))] == kept
        assert (f"are in {tmp_path / f'metrics-{len(kept)}.jsonl'}" in found.stdout) == ("\n" in there)


def test_a_run_that_goes_on_keeps_no_other_metrics(tmp_path: Path) -> None:
    saves = ("--saves", str(tmp_path / "saves"))
    for steps, resume in (("1", ()), ("2", ("--resume",))):
        found = train(tmp_path, *SMALL, "--steps", steps, *saves, *resume, "--json")
        assert json.loads(found.stdout)["earlier_metrics"] is None
    assert list(tmp_path.glob("metrics-*")) == []


def test_another_text_of_the_same_length_is_not_resumed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    options = (*SMALL, "--data", str(text), "--saves", str(tmp_path / "saves"))
    text.write_text("hello world " * 500)
    assert train(tmp_path, *options, "--steps", "1").exit_code == 0
    text.write_text("OTHER WORLD " * 500)
    found = train(tmp_path, *options, "--steps", "2", "--resume")
    assert found.exit_code == 2
    assert "make it with the same data, byte for byte" in " ".join(found.stderr.split())
    text.write_text("hello world " * 500)
    assert train(tmp_path, *options, "--steps", "2", "--resume").exit_code == 0


def test_what_a_worker_finds_wrong_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """A process of its own: with the exception on its way, its end must not wait for workers that hear no signals."""
    wrong_mask(tmp_path)
    command = [
        sys.executable, "-m", "tapestream.cli.app", "train", "dranet", "--layers", "35", "--width", "4", "--size", "16",
        "--steps", "1", "--device", "cpu", "--workers", "1", "--data", str(tmp_path), "--classes", "6", "--metrics",
        str(tmp_path / "metrics.jsonl"),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 2
    assert "x.png holds the label 9, but there are 6 classes" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_what_is_wrong_in_the_midst_ends_the_run_saved_and_mended_it_goes_on(workers: str, tmp_path: Path) -> None:
    """As the run that never failed, bit for bit; the save that was just made (every 2 steps) is made anew."""
    image, data = pytest.importorskip("PIL.Image"), tmp_path / "data"
    for kind in ("images", "masks"):
        (data / kind).mkdir(parents=True)
        for number in range(8):
            image.fromarray(numpy.full((16, 16), number, numpy.uint8)).save(data / kind / f"{number}.png")
    batches = ImageBatches(MaskFolders(data, 16, 8), 2)
    seen = [set(next(batches)[1].flatten().tolist()) for _ in range(4)]
    bad = data / "masks" / f"{min(seen[2] - seen[1] - seen[0])}.png"
    good = bad.read_bytes()
    options = (
        "dranet", "--layers", "35", "--width", "4", "--size", "16", "--batch", "2", "--device", "cpu", "--steps", "4",
        "--data", str(data), "--classes", "8", "--workers", workers, "--save-every", "2", "--saves",
    )  # fmt: skip

    def losses() -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert train(tmp_path, *options, str(tmp_path / "whole")).exit_code == 0
    expected = losses()
    image.fromarray(numpy.arange(256, dtype=numpy.uint8).reshape(16, 16)).save(bad)
    assert bad.stat().st_size != len(good)
    failed = train(tmp_path, *options, str(tmp_path / "saves"))
    assert failed.exit_code == 2
    assert f"{bad.name} holds the label 254" in failed.stderr
    assert "(for step 3; the run is saved after step 2: fix this, then go on with --resume)" in failed.stderr
    assert losses() == expected[:2]
    bad.write_bytes(good)
    found = train(tmp_path, *options, str(tmp_path / "saves"), "--resume")
    assert found.exit_code == 0, found.stderr
    assert losses() == expected
    last = [sorted((tmp_path / folder).glob("0*/model"))[-1] for folder in ("whole", "saves")]
    whole, resumed = ((path / "model.safetensors").read_bytes() for path in last)
    assert whole == resumed


def test_batches_from_workers_are_the_same_batches() -> None:
    alone, beside = ImageBatches(Shapes(8), 2), ImageBatches(Shapes(8), 2, workers=2)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(next(alone), next(beside), strict=True))
    assert beside.state_dict() == alone.state_dict()  # not what the workers have made ahead
    beside.load_state_dict({**alone.state_dict(), "drawn": 1})
    alone.load_state_dict(beside.state_dict())
    assert all(torch.equal(*pair) for pair in zip(next(alone), next(beside), strict=True))


def test_workers_end_with_what_they_work_for_also_in_a_cycle() -> None:
    """The collector takes queues and what would have told the workers apart in any order."""
    batches = ImageBatches(Shapes(8), 2, workers=2)
    next(batches)
    workers = batches._ahead.batches._workers
    cycle = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_to_all_processes_saves_with_workers_too(number: signal.Signals, tmp_path: Path) -> None:
    """As a terminal sends Ctrl-C. SIGUSR1 before it saves and goes on."""
    metrics, saves = tmp_path / "metrics.jsonl", tmp_path / "saves"
    command = [
        sys.executable, "-m", "tapestream.cli.app", "train", "resnet", "--layers", "14", "--width", "8", "--steps",
        "5000", "--workers", "2", "--device", "cpu", "--metrics", str(metrics), "--saves", str(saves),
    ]  # fmt: skip

    def wait_for(what: Any) -> None:
        while not what():
            assert run.poll() is None, run.communicate()
            time.sleep(0.01)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        wait_for(lambda: metrics.exists() and metrics.read_text())
        os.killpg(run.pid, signal.SIGUSR1)
        wait_for(lambda: list(saves.glob("0*/manifest.json")))
        os.killpg(run.pid, number)
        out, err = run.communicate()
    assert run.returncode == 128 + number, err
    taken = len(metrics.read_text().splitlines())
    assert f"stopped and saved after step {taken} of 5000" in out
    assert ts.load(saves)["step"] == taken


def test_metrics_that_cannot_be_written_lose_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = cli_train.tell

    def full(lines: Any, record: Any, first: int, earlier: Any) -> str:
        if record.step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return told(lines, record, first, earlier)

    saves = ("--saves", str(tmp_path / "saves"), "--steps", "4")
    monkeypatch.setattr(cli_train, "tell", full)
    found = train(tmp_path, *SMALL, *saves)
    assert found.exit_code == 2
    assert "No space left on device" in found.stderr
    assert "saved after step 3" in found.stderr
    monkeypatch.setattr(cli_train, "tell", told)
    assert train(tmp_path, *SMALL, *saves, "--resume").exit_code == 0
    assert train(tmp_path / "plain", *SMALL, "--saves", str(tmp_path / "whole"), "--steps", "4").exit_code == 0
    last, whole = (ts.load(tmp_path / name)["step"] for name in ("saves", "whole"))
    assert last == whole == 4
    files = [sorted((tmp_path / name).rglob("*.safetensors"))[-1] for name in ("saves", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_metrics_of_a_run_under_way_are_refused_to_another(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tapestream.cli.train import writing\n"
    code += "writing(Path(sys.argv[1]), append=True)"
    path = tmp_path / "metrics.jsonl"
    with writing(path, append=True):
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "is being written by another run" in done.stderr


def test_resuming_from_a_save_saves_beside_it(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    assert train(tmp_path, *SMALL, "--saves", str(saves), "--steps", "2", "--save-every", "1").exit_code == 0
    found = train(tmp_path, *SMALL, "--saves", str(saves / "000001"), "--steps", "3", "--resume")
    assert found.exit_code == 0, found.stderr
    assert [path.name for path in Saves(saves).complete()] == ["000002", "000003"]
    assert not list((saves / "000002").glob("0*"))
    assert ts.load(saves)["step"] == 3


def test_nothing_is_saved_inside_a_save(tmp_path: Path) -> None:
    ts.save(tmp_path, numbers=torch.nn.Linear(1, 1))
    with pytest.raises(ts.StorageError, match="is a save itself"):
        ts.save(tmp_path / "000001", numbers=torch.nn.Linear(1, 1))
    with pytest.raises(ts.InputError, match="given as the folder"):
        ts.save("", numbers=torch.nn.Linear(1, 1))


def test_a_pipe_in_the_place_of_tensors_is_named(tmp_path: Path) -> None:
    ts.save(tmp_path, numbers=torch.nn.Linear(1, 1))
    (shard,) = (tmp_path / "000001" / "numbers").glob("*.safetensors")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ts.StorageError, match="no file of tensors but"):
        ts.load(tmp_path, numbers=torch.nn.Linear(1, 1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_is_one_line(tmp_path: Path) -> None:
    command = f"{Path(sys.executable).parent / 'tapestream'} plan gpt2-124m --budget 4GiB > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("cannot write the output")
    assert "Traceback" not in done.stderr
