"""Claim: beside DeepSpeed's ZeRO-3 with CPU offload of parameters and optimizer, on the CPU, no more memory and time.

One process, ``DS_ACCELERATOR=cpu``, as DeepSpeed runs where there is no GPU: its copies go from RAM to RAM. Each of its
two optimizers is measured: the torch optimizer that ours uses too, and its own CPU Adam, which it compiles at first use
(minutes, a C++ compiler). Memory is what the process holds resident at the peak of a step beyond what it held before
the model was made, each side in a process of its own; that of DeepSpeed is the budget of ours. Times are taken in turn
in one process. Needs ``DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`` (tried: 0.19.8, which wants
setuptools and wheel installed first).
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.beside_ramtorch import our_step
from benchmarks.common import Row, Settings, alternate, mebibytes, milliseconds, same_bits, save, settings, yes
from benchmarks.everything_fits import stepper
from benchmarks.networks import Case, Network, gpt

TITLE = "Beside DeepSpeed's ZeRO-3 with CPU offload, on the CPU, at no more memory than it takes"
OPTIMIZERS = ("torch", "DeepSpeed")
Step = Callable[[], None]


def main() -> None:
    """Measure all cases, or in a child process the memory of one side."""
    if "--memory" in sys.argv:
        _child()
        return
    chosen = settings("cpu", rounds=7)
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed, so nothing is measured: see the head of this file")
        return
    _prepare()
    rows = (measure(case, name, chosen) for case in _cases(chosen.quick) for name in OPTIMIZERS)
    save("beside_deepspeed", TITLE, chosen, rows, deepspeed=metadata.version("deepspeed"), optimizer="AdamW")


def _cases(quick: bool) -> list[Case]:
    return [gpt(4, 64, 2, 32, "cpu")] if quick else [gpt(6, 512, 4, 128, "cpu"), gpt(6, 512, 1, 64, "cpu")]


def measure(case: Case, optimizer: str, chosen: Settings) -> Row:
    """One of DeepSpeed's optimizers and ours."""
    theirs_nbytes = _resident(chosen.quick, case, optimizer, 0)
    ours_nbytes = _resident(chosen.quick, case, "ours", theirs_nbytes)
    plain, network, other = case.network(), case.network(), case.network()
    theirs, engine = deepspeed_step(other, case, optimizer)
    steps = {
        "plain": stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True)),
        "ours": our_step(network, case, theirs_nbytes),
        "DeepSpeed": theirs,
    }
    timings = alternate(steps, chosen.rounds, "cpu")
    reference, found = list(plain.parameters()), timings.ratio("ours", "DeepSpeed")
    with import_module("deepspeed").zero.GatheredParameters(list(other.parameters())):
        theirs_same = same_bits(reference, list(other.parameters()))
    engine.destroy()
    return {
        "network": case.name, "its optimizer": optimizer, "its MiB": mebibytes(theirs_nbytes),
        "MiB": mebibytes(ours_nbytes), "plain ms": milliseconds(timings.seconds("plain")),
        "its ms": milliseconds(timings.seconds("DeepSpeed")), "ms": milliseconds(timings.seconds("ours")), **found,
        "claim": "at most 1.00", "met": yes(found["ratio"] <= 1.0 and ours_nbytes <= theirs_nbytes),
        "its bits same as plain": yes(theirs_same),
        "ours same as plain": yes(same_bits(reference, list(network.parameters()))),
    }  # fmt: skip


def deepspeed_step(network: Network, case: Case, optimizer: str) -> tuple[Step, Any]:
    """A step of the ZeRO-3 engine with AdamW, as DeepSpeed's documentation shows it, and the engine."""
    x, targets = case.batch()
    offloaded = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": x.shape[0],
        "zero_optimization": {"stage": 3, "offload_param": offloaded, "offload_optimizer": offloaded},
    }
    mine = None
    if optimizer == "torch":
        mine = torch.optim.AdamW(network.parameters(), fused=True)
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}}
    engine, *_ = import_module("deepspeed").initialize(model=network, optimizer=mine, config=config)

    def step() -> None:
        engine.backward(engine(x, targets))  # the engine clears gradients in its step
        engine.step()

    return step, engine


def _prepare() -> None:
    """What DeepSpeed needs before it can be imported and used in one process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    warnings.filterwarnings("ignore", category=FutureWarning)  # its calls of torch.distributed by older names
    deepspeed = import_module("deepspeed")
    import_module("logging").getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _resident(quick: bool, case: Case, side: str, budget: int) -> int:
    """Bytes of one side, from a child process in which malloc returns what is freed."""
    index = [known.name for known in _cases(quick)].index(case.name)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # this process has the other
    command = [sys.executable, "-m", "benchmarks.beside_deepspeed", "--memory", side, str(index), str(budget)]
    if quick:
        command.append("--quick")
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(next(line for line in found.stdout.splitlines() if line.startswith("bytes ")).split()[1])


def _child() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    side, case, budget = given.memory[0], _cases(given.quick)[int(given.memory[1])], int(given.memory[2])
    torch.set_num_threads(1)
    if side != "ours":
        _prepare()
    our_step(*_tiny(), 2**30)()  # what PyTorch itself takes once started is not of the model
    if side != "ours":
        deepspeed_step(*_tiny(), side)[0]()
    before = _status("VmRSS")
    step = our_step(case.network(), case, budget) if side == "ours" else deepspeed_step(case.network(), case, side)[0]
    step()
    step()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    print("bytes", _status("VmHWM") - before)


def _tiny() -> tuple[Network, Case]:
    tiny = gpt(2, 64, 2, 32, "cpu")
    return tiny.network(), tiny


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
