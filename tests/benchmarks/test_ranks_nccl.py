"""The benchmark of several GPUs: its options, and its sides in small on the CPU with gloo."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.ranks_nccl")


def test_with_fewer_than_two_gpus_one_line_and_status_two(
    table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for there in (0, 1):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        assert table.main(["--out", str(tmp_path)]) == 2
        assert len(capsys.readouterr().out.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_sizes_are_those_asked_for(table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = []

    def run(command: list[str], seconds: float) -> Any:
        jobs.append(table.Job(**json.loads(command[-1])))
        return table.children.Ended(3, ("out of memory",))

    monkeypatch.setattr(table.children, "run", run)
    monkeypatch.setattr(table, "_machine", lambda given: (given.ranks or 8, "a card"))
    assert table.main(["--out", str(tmp_path)]) == len(table.SIDES)  # each has failed, and has a line
    assert [job.side for job in jobs] == list(table.SIDES)
    assert jobs[0].ranks == 8
    assert jobs[0].config.parameters == pytest.approx(1.3e9, rel=0.02)
    table.main(["--out", str(tmp_path), "--quick", "--only", "ddp", "--layers", "7", "--ranks", "4"])
    assert (jobs[-1].side, jobs[-1].layers, jobs[-1].width, jobs[-1].ranks) == ("ddp", 7, table.SMALL["width"], 4)
    assert jobs[-1].since == len(table.SIDES)
    for wrong in (["--only", "other"], ["--ranks", "1"]):
        with pytest.raises(SystemExit):
            table.main(["--out", str(tmp_path), *wrong])


def test_two_sides_in_small(table: Any, tmp_path: Path) -> None:
    assert table.main(["--out", str(tmp_path), "--dry", "--only", "ddp,copies-device"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert not [line for line in lines if "error" in line]
    [same] = [line for line in lines if line["result"] == "same bits"]
    assert (same["step"], same["same_bits"], same["claim"]) == ("copies-device", True, "")  # it was not run again


@pytest.mark.full
def test_all_sides_in_small(table: Any, tmp_path: Path) -> None:
    assert table.main(["--out", str(tmp_path), "--dry"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert not [line for line in lines if "error" in line or "skipped" in line]
    same = {line["step"]: line["verdict"] for line in lines if line["result"] == "same bits" and line["claim"]}
    ours = [name for name, side in table.SIDES.items() if side.beside]
    assert same == dict.fromkeys(["ddp-again", *ours], True)
    for line in lines:
        assert math.isfinite(line.get("step_seconds", 1.0))
        if line["step"].startswith("divided") and "gathered_bytes" in line:
            assert line["gathered_bytes"] == line["device_to_shard_bytes"] > 0
    table.main(["--out", str(tmp_path), "--dry", "--only", "divided-device"])
    *_, last = (tmp_path / "results.jsonl").read_text().splitlines()
    assert "fsdp2" in json.loads(last)["skipped"]  # it had a result in another run


def test_a_digest_is_of_every_bit(table: Any) -> None:
    rank = importlib.import_module("benchmarks.gpu.contact.rank")
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    before = rank.digest_of(model)
    assert rank.digest_of(model) == before
    with torch.no_grad():
        model.bias[1] += 1
    assert rank.digest_of(model) != before
