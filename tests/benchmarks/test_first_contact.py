"""The first run on a GPU keeps what it has, whatever happens to its steps. No GPU here, and no simulated one."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
LONG = 600  # seconds that no test waits for


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("children", "chosen", "intervals", "models", "results", "speed", "truth")
    found = {name: importlib.import_module(f"benchmarks.gpu.contact.{name}") for name in names}
    return SimpleNamespace(first=importlib.import_module("benchmarks.gpu.first_contact"), **found)


@pytest.fixture
def step(contact: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes a step of a few lines, which may use ``write(verdict)``."""

    def make(name: str, code: str, seconds: float = LONG, **options: Any) -> Any:
        head = f"""
            import os, subprocess, sys, time
            from pathlib import Path
            from benchmarks.gpu.contact.results import Result, Results
            def write(verdict):
                Results(Path({str(tmp_path)!r}), "a card").write({name!r}, Result("one", "holds", verdict))
        """
        text = textwrap.dedent(head) + textwrap.dedent(code)
        return contact.first.Step(name, f"step {name}", seconds, lambda _: ("-c", text), **options)

    return make


@pytest.fixture
def results(contact: Any, tmp_path: Path) -> Any:
    return contact.results.Results(tmp_path, "a card")


def test_without_a_gpu_one_line_and_status_two(
    contact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert contact.first.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_step_that_does_not_exist_is_refused(
    contact: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        contact.first.main(["--out", str(tmp_path), "--only", "a,z"])
    assert "no step is named z" in capsys.readouterr().err


def test_every_step_of_the_table_can_be_imported_and_fits_in_the_time(contact: Any) -> None:
    for _, _, seconds, function, least in contact.first.TABLE:
        module, _, name = function.partition(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.contact.{module}"), name))
        assert 0 < least <= seconds
    needed = [seconds for name, _, seconds, *_ in contact.first.TABLE if name not in contact.first.EXTRAS]
    assert sum(needed) <= contact.first.TOTAL_SECONDS


def test_the_status_counts_what_is_false(step: Any, results: Any, contact: Any) -> None:
    steps = [step("p", "write(True); write(None)"), step("q", "write(False); write(False)"), step("r", "write(True)")]
    assert contact.first.run(steps, results, LONG) == 2
    lines = results.read()
    assert [(line["step"], line["verdict"]) for line in lines] == [
        ("p", True), ("p", None), ("q", False), ("q", False), ("r", True),
    ]  # fmt: skip
    assert {line["card"] for line in lines} == {"a card"}
    assert contact.first.run([step("s", "write(True)")], results, LONG) == 0  # what was there before does not count


def test_the_status_ends_at_a_hundred(step: Any, results: Any, contact: Any) -> None:
    assert contact.first.run([step("p", "for _ in range(120): write(False)")], results, LONG) == 100


def test_a_step_that_fails_is_a_line_with_what_it_printed_last(step: Any, results: Any, contact: Any) -> None:
    steps = [step("p", "write(True); print('about to'); raise SystemError('no luck')"), step("q", "write(True)")]
    assert contact.first.run(steps, results, LONG) == 1
    kept, error, other = results.read()
    assert (kept["verdict"], other["step"]) == (True, "q")
    assert error["error"] == "exit status 1"
    assert "about to" in error["output"]
    assert "SystemError: no luck" in error["output"][-1]


def test_a_step_that_dies_of_a_signal_is_a_line(step: Any, results: Any, contact: Any) -> None:
    assert contact.first.run([step("p", "os.kill(os.getpid(), 11)")], results, LONG) == 1
    assert results.read()[0]["error"] == "killed by SIGSEGV"


def test_a_step_that_overruns_is_killed_with_all_it_started(
    step: Any, results: Any, contact: Any, tmp_path: Path
) -> None:
    code = f"""
        write(True)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({LONG})"])
        Path({str(tmp_path / "pid")!r}).write_text(str(other.pid))
        print("waiting")
        time.sleep({LONG})
    """
    assert contact.first.run([step("p", code, 4), step("q", "write(True)")], results, LONG) == 1
    kept, error, other = results.read()
    assert (kept["verdict"], error["error"], other["step"]) == (True, "its time ran out", "q")
    assert error["output"] == ["waiting"]
    assert ended(int((tmp_path / "pid").read_text()))


def test_without_time_left_steps_are_missing_and_extras_are_not(step: Any, results: Any, contact: Any) -> None:
    steps = [step("p", "write(True)", 50, least_seconds=20), step("q", "write(True)", 50, extra=True)]
    assert contact.first.run(steps, results, 5) == 1
    [line] = results.read()
    assert (line["step"], line["error"]) == ("p", "no time was left")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_cut_off_keeps_what_it_had(number: int, contact: Any, results: Any, tmp_path: Path) -> None:
    child = f"""if True:
        import os, time
        from pathlib import Path
        from benchmarks.gpu.contact.results import Result, Results
        Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        Results(Path({str(tmp_path)!r}), "a card").write("a", Result("one", "holds", True))
        time.sleep({LONG})
    """
    code = f"""if True:
        from benchmarks.gpu import first_contact
        first_contact._steps = lambda *_: [first_contact.Step("a", "cut off", {LONG}, lambda _: ("-c", {child!r}))]
        first_contact._card = lambda: "a card"
        first_contact.main(["--out", {str(tmp_path)!r}])
    """
    run = subprocess.Popen([sys.executable, "-c", code], env=contact.children.environment_of())
    while not results.read():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    run.wait()
    child = int((tmp_path / "pid").read_text())
    if number == signal.SIGTERM:
        assert ended(child)  # nothing is left behind where there was time to clean up
    else:
        os.killpg(child, signal.SIGKILL)
    [line] = results.read()
    assert line["result"] == "one"


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for somebody to ask how it ended."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_line_cut_off_is_left_out(results: Any, contact: Any) -> None:
    results.write("p", contact.results.Result("one", numbers={"some_seconds": 0.5}))
    with results.path.open("a") as file:
        file.write('{"step": "p", "resu')
    [line] = results.read()
    assert line["some_seconds"] == 0.5


def test_overlap_that_can_be_counted_by_hand(contact: Any) -> None:
    there = contact.intervals
    assert there.union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert there.length([(0, 1), (0.5, 2), (3, 4)]) == 3
    assert there.shared([(0, 2), (5, 9)], [(1, 3), (4, 6), (8, 20)]) == 1 + 1 + 1
    assert there.hidden([(0, 2), (4, 6)], [(1, 5)]) == 0.5
    assert there.hidden([], [(1, 5)]) is None


def test_a_trace_in_kernels_and_copies(contact: Any) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 5e5, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 2e6, "dur": 1e6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 0, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e6},
        {"ph": "M", "name": "process_name"},
    ]
    lanes = contact.intervals.of_events(events)
    assert lanes == {"kernel": [(0, 1)], "up": [(0.5, 1.5)], "down": [(2, 3)]}
    assert contact.intervals.hidden(lanes["up"], lanes["kernel"]) == 0.5


def test_shapes_are_those_published(contact: Any) -> None:
    shape = contact.models.LLAMA_8B
    model = contact.models.llama(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters == 8_030_261_248
    tiny = contact.models.TINY
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    products, attention = 2 * 32 * (8 * layer + 64 * 256), 8 * (2 * 2 * 32 * 32 * 64) / 2
    assert tiny.flops(3, 32) == 3 * 3 * (products + attention)


def test_weights_made_quickly_train(contact: Any) -> None:
    models = contact.models
    model = models.on_device(models.llama(replace(models.TINY, dtype=torch.float32)), "cpu")
    tokens, targets = models.batch(256, 2, 32, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[2] < losses[1] < losses[0]
    x = torch.randn(1, 2, 5, 8)
    turned = models.rotated(x)
    assert torch.equal(turned[..., 0, :], x[..., 0, :])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[..., 1, :], x[..., 1, :])


def test_a_matrix_is_filled_with_other_rows_whatever_its_size(contact: Any) -> None:
    layer = torch.nn.Linear(1024, 3000)
    contact.models.fill(layer, 2)
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert not torch.equal(layer.weight[0], layer.weight[1024])
    assert not layer.bias.any()


def test_rows_in_units_of_their_own(contact: Any) -> None:
    assert contact.speed._in_units(("plain ms", 1500.0)) == ("plain_seconds", 1.5)
    assert contact.speed._in_units(("budget MiB", 2.0)) == ("budget_bytes", 2**21)
    assert contact.speed._in_units(("same bits", "yes")) == ("same_bits", "yes")


@pytest.mark.parametrize("workers", [("-p", "no:xdist"), ("-n", "2")])
def test_outcomes_are_written_as_tests_end(workers: tuple[str, ...], contact: Any, tmp_path: Path) -> None:
    if workers[0] == "-n":
        pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='so')\n"
        "def test_left_out(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError('at the start')\n"
        "def test_broken(broken): pass\n"
    )
    command = [*contact.truth.pytest_command(tmp_path / "outcomes"), "-p", "no:timeout", *workers, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=contact.children.environment_of(), capture_output=True, check=False)
    assert done.returncode == 1, done.stdout.decode() + done.stderr.decode()
    found = [json.loads(line) for line in (tmp_path / "outcomes").read_text().splitlines()]
    outcomes = {line["id"].rpartition("::")[2]: line["outcome"] for line in found}
    assert len(found) == 4
    assert outcomes == {
        "test_good": "passed", "test_bad": "failed", "test_left_out": "skipped", "test_broken": "failed",
    }  # fmt: skip
    reasons = {line["id"].rpartition("::")[2]: line["why"] for line in found}
    assert "1 == 2" in reasons["test_bad"]
    assert "at the start" in reasons["test_broken"]


def test_tests_run_beside_each_other_until_the_time_is_up(contact: Any, tmp_path: Path) -> None:
    def ran(*codes: str, seconds: float = LONG) -> bool:
        commands = [[sys.executable, "-c", code] for code in codes]
        chosen = contact.chosen.Chosen(False, time.monotonic() + seconds, tmp_path)
        found: bool = contact.truth._in_time(commands, 2, dict(os.environ), chosen)
        return found

    left = [
        f"from pathlib import Path; Path({str(tmp_path / str(k))!r}).touch(); raise SystemExit({k % 2})"
        for k in range(3)
    ]
    assert ran(*left)  # with status 1 pytest says that tests have failed
    assert all((tmp_path / str(k)).exists() for k in range(3))
    assert not ran("pass", "raise SystemExit(3)")  # it did not run them
    assert not ran("import time; time.sleep(20)", seconds=0)
