"""Is it right? The tests that need a GPU, and everyday training beside plain PyTorch."""

import collections
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.contact import simulated
from benchmarks.gpu.contact.children import ROOT, environment_of
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.results import Result

FOLDER = ROOT / "tests" / "gpu"
WORKERS = 8
_SHOWN = 30  # failures with their reasons
_TO_END = 4.0  # seconds before the step's end at which tests are stopped, so that what is known is written


def tests(chosen: Chosen) -> Iterator[Result]:
    """tests/gpu but for the scenarios, which are a step of their own; one of its files in a dry run."""
    files = chosen.size(sorted(FOLDER.glob("test_*.py")), [FOLDER / "test_engines.py"])
    files = [file for file in files if file.name != "test_scenarios.py"]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes"
        ended = _run(files, outcomes, chosen)
        found = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    counts = collections.Counter(one["outcome"] for one in found)
    failed = {one["id"]: one["why"] for one in found if one["outcome"] == "failed"}
    numbers = {
        "passed": counts["passed"], "failed": len(failed), "skipped": counts["skipped"], "all_ran": ended,
        "longest_seconds": round(max((one["seconds"] for one in found), default=0.0), 2),
        "failures": dict(list(failed.items())[:_SHOWN]),
    }  # fmt: skip
    yield Result("tests/gpu", "every test passes", ended and not failed and counts["passed"] > 0, numbers)


def _run(files: Sequence[Path], outcomes: Path, chosen: Chosen) -> bool:
    """Whether all of them came to an end in time, as far as they ran. In eight processes; where pytest-xdist is
    missing, one for each file."""
    command = [*pytest_command(outcomes), *(("-p", simulated.PLUGIN) if chosen.dry else ())]
    workers = chosen.size(WORKERS, 2)
    if importlib.util.find_spec("xdist") is not None:
        batches = [[*command, "-n", str(workers), "--dist", "worksteal", *map(str, files)]]
    else:
        batches = [[*command, str(file)] for file in files]
    path = os.pathsep.join((environment_of()["PYTHONPATH"], str(simulated.PATH)))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}  # eight processes with a thread for each core would wait
    return _in_time(batches, workers, environment_of(more), chosen)


def pytest_command(outcomes: Path) -> list[str]:
    """pytest without the options that the project's own runs have; a plugin that is missing here is no error."""
    found = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.contact.reporting", "--outcomes", str(outcomes)]
    return [*found, "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore:Unknown config option"]


def _in_time(commands: list[list[str]], at_once: int, environment: dict[str, str], chosen: Chosen) -> bool:
    """Run all, some at once, until the step's time is nearly up; whether all ended as pytest ends that has run tests.
    What these have started belongs to this step's group of processes and is killed with it."""
    waiting, running, fine = list(commands), list[subprocess.Popen[bytes]](), True
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(subprocess.Popen(waiting.pop(0), cwd=ROOT, env=environment))
        for process in [one for one in running if one.poll() is not None]:
            running.remove(process)
            fine &= process.returncode in (0, 1)
        if chosen.left_seconds < _TO_END:
            say("the time is up: tests are stopped")
            for process in running:
                process.kill()
                process.wait()
            return False
        time.sleep(0.05)
    return fine


def scenarios(chosen: Chosen) -> Iterator[Result]:
    """Each scenario of ``tests/gpu/scenarios.py``, in three processes so that the host's own time adds up less."""
    if chosen.part is None and not chosen.dry:
        parts = 3
        processes = [
            subprocess.Popen([sys.executable, *chosen.command, "--part", f"{k}/{parts}"], cwd=ROOT)
            for k in range(parts)
        ]
        status = [process.wait() for process in processes]
        if any(status):
            raise RuntimeError(f"the processes that run the scenarios ended with {status}")
        return
    part, parts = chosen.part or (0, 1)
    sys.path.insert(0, str(FOLDER))
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    module = importlib.import_module("scenarios")
    for name in list(module.SCENARIOS)[part::parts]:
        begin = time.monotonic()
        try:
            wrong = module.unequal(module.SCENARIOS[name](chosen.device))
            numbers = {"wrong": len(wrong), "first": wrong[:3]}
        except Exception as error:  # the next scenario runs all the same
            wrong = [f"{type(error).__name__}: {error}"]
            numbers = {"error": wrong[0][:300]}
        numbers["took_seconds"] = round(time.monotonic() - begin, 2)
        yield Result(name, "bit for bit as plain PyTorch", not wrong, numbers)
