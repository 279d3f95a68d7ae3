"""Claim (d): beside RamTorch (``pip install --no-deps ramtorch``) on the CPU, no more memory and no more time.

RamTorch's `OffloadModel` runs on the CPU, where its copies become clones. Each of its three ways to treat activations
is measured. Memory is what the process holds resident at the peak of a step beyond what it held before the model was
made, each side in a process of its own; that of RamTorch is the budget of ours. Times are taken in turn in one process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from benchmarks.common import Row, Settings, alternate, mebibytes, milliseconds, same_bits, save, settings, yes
from benchmarks.everything_fits import stepper
from benchmarks.networks import Case, Network, gpt

TITLE = "Beside RamTorch on the CPU, at no more memory than it takes"
MODES: dict[str, bool | str] = {"keep": True, "recompute": False, "checkpoint": "checkpoint"}
Step = Callable[[], None]


def main() -> None:
    """Measure all modes, or in a child process the memory of one side."""
    if "--memory" in sys.argv:
        _child()
        return
    chosen = settings("cpu", rounds=7)
    if find_spec("ramtorch") is None:
        print("RamTorch is not installed, so nothing is measured: pip install --no-deps ramtorch")
        return
    rows = (measure(case, mode, chosen) for case in _cases(chosen.quick) for mode in MODES)
    save(
        "beside_ramtorch", TITLE, chosen, rows, ramtorch=metadata.version("ramtorch"), window=2,
        optimizer="AdamW (fused)", disk_tier=_disk_tier(chosen.folder),
    )  # fmt: skip


def _cases(quick: bool) -> list[Case]:
    return [gpt(4, 64, 2, 32, "cpu")] if quick else [gpt(6, 512, 4, 128, "cpu"), gpt(6, 512, 1, 64, "cpu")]


def measure(case: Case, mode: str, chosen: Settings) -> Row:
    """One mode of RamTorch and ours."""
    theirs_nbytes = _resident(chosen.quick, case, mode, 0)
    ours_nbytes = _resident(chosen.quick, case, "ours", theirs_nbytes)
    plain, network, other = case.network(), case.network(), case.network()
    theirs, offloaded = ramtorch_step(other, case, MODES[mode])
    steps = {
        "plain": stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True)),
        "ours": our_step(network, case, theirs_nbytes),
        "RamTorch": theirs,
    }
    timings = alternate(steps, chosen.rounds, "cpu")
    offloaded.close()
    found = timings.ratio("ours", "RamTorch")
    reference = list(plain.parameters())
    return {
        "network": case.name, "RamTorch's way": mode, "its MiB": mebibytes(theirs_nbytes),
        "MiB": mebibytes(ours_nbytes), "plain ms": milliseconds(timings.seconds("plain")),
        "its ms": milliseconds(timings.seconds("RamTorch")), "ms": milliseconds(timings.seconds("ours")), **found,
        "claim": "at most 1.00", "met": yes(found["ratio"] <= 1.0 and ours_nbytes <= theirs_nbytes),
        "its bits same as plain": yes(same_bits(reference, list(other.parameters()))),
        "ours same as plain": yes(same_bits(reference, list(network.parameters()))),
    }  # fmt: skip


def our_step(network: Network, case: Case, budget: int) -> Step:
    """A step of the streamed model with AdamW."""
    ts.stream(network, device="cpu", budget=budget)
    return stepper(network, case, ts.optimizer(network, torch.optim.AdamW, fused=True))


def ramtorch_step(network: Network, case: Case, keep: bool | str) -> tuple[Step, Any]:
    """A step of RamTorch's OffloadModel with AdamW, as its documentation shows it."""
    x, targets = case.batch()
    chunks: list[nn.Module] = [network.before, *network.blocks, network.after]
    model = import_module("ramtorch").OffloadModel(chunks, device="cpu", window=2, keep_activations=keep)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), wanted.flatten())

    def step() -> None:
        optimizer.zero_grad()
        model.step(x, targets=targets, loss_fn=loss)
        model.flush_grads()
        optimizer.step()

    return step, model


def _disk_tier(folder: str) -> str:
    """Whether RamTorch trains from disk here: what it says to a tiny attempt."""
    case = gpt(2, 64, 1, 16, "cpu")
    network = case.network()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        model = import_module("ramtorch").OffloadModel(
            list(network.blocks), device="cpu", nvme=1, nvme_path=str(Path(place) / "weights")
        )
        try:
            model.step(torch.randn(1, 16, 64))
        except RuntimeError as error:
            return f"not measured: {str(error).split('. ')[0]}"
        finally:
            model.close()
    return "not measured: it keeps gradients and optimizer state in RAM, so that no budget makes the two comparable"


def _resident(quick: bool, case: Case, side: str, budget: int) -> int:
    """Bytes of one side, from a child process in which malloc returns what is freed."""
    index = [known.name for known in _cases(quick)].index(case.name)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.beside_ramtorch", "--memory", side, str(index), str(budget)]
    if quick:
        command.append("--quick")
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


def _child() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    side, case, budget = given.memory[0], _cases(given.quick)[int(given.memory[1])], int(given.memory[2])
    torch.set_num_threads(1)
    if side != "ours":
        import_module("ramtorch")
    tiny = gpt(2, 64, 2, 32, "cpu")
    _make("ours", tiny, 2**30)()  # what PyTorch itself takes once started is not of the model
    before = _status("VmRSS")
    step = _make(side, case, budget)
    step()
    step()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    print(_status("VmHWM") - before)


def _make(side: str, case: Case, budget: int) -> Step:
    network = case.network()
    return our_step(network, case, budget) if side == "ours" else ramtorch_step(network, case, MODES[side])[0]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
