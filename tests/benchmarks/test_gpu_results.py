"""The benchmarks for a GPU keep each row as it comes, compare what lies apart, and run on the simulated GPU."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def simulated(test: Callable[..., None]) -> Callable[..., None]:
    """Of the full product, where the simulated GPU can be had."""
    for mark in (
        pytest.mark.full,
        pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated GPU is compiled with g++"),
        pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA of its own"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.common")


def test_rows_are_saved_before_the_next_is_measured(common: Any, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield {"number": 1}
        yield {"number": 2}
        raise MemoryError

    chosen = common.Settings("cpu", False, 1, 1, True, str(tmp_path), tmp_path / "results")
    with pytest.raises(MemoryError):
        common.save("some", "Some", chosen, rows())
    assert json.loads((tmp_path / "results" / "some.json").read_text())["rows"] == [{"number": 1}, {"number": 2}]


def test_products_are_measured_before_there_is_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    table: Any = importlib.import_module("benchmarks.gpu.million_layers")
    order = []
    for owner, name in ((table, "flops_per_second"), (table.ts, "stream")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real, **k: (order.append(name), real(*a, **k))[1])
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    table.streamed(table.jobs(quick=True)[1], chosen)
    assert order == ["flops_per_second", "stream"]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(("-c", code) if code else ()), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@simulated
def test_bits_are_compared_wherever_they_lie() -> None:
    code = """if True:
        import simulated_gpu
        simulated_gpu.load()
        import torch
        from benchmarks.common import same_bits
        here = torch.arange(4.0)
        there = here.cuda()
        assert same_bits([here, there, None], [there, here, None])
        assert not same_bits([here], [there + 1])
    """
    done = run(code)
    assert done.returncode == 0, done.stderr


@simulated
def test_first_contact_in_small(tmp_path: Path) -> None:
    done = run("", "-m", "benchmarks.gpu.first_contact", "--dry", "--only", "e,h", "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert done.returncode == sum(line["verdict"] is False for line in lines), done.stdout
    assert {line["card"] for line in lines} == {"simulated"}
    assert not [line for line in lines if "error" in line]
    assert {"timeline", "copies hidden", "speed", "losses", "allocated"} <= {line["result"] for line in lines}
