"""Claim: beside DeepSpeed's ZeRO-3 with CPU offload of parameters and optimizer, on the CPU, no more memory and time.

One process, ``DS_ACCELERATOR=cpu``, as DeepSpeed runs where there is no GPU: its copies go from RAM to RAM. Each of its
two optimizers is measured, as `benchmarks.peer` says: the torch optimizer that ours uses too, and its own CPU Adam,
which it compiles at first use (minutes, a C++ compiler). Needs ``DS_ACCELERATOR=cpu pip install --no-build-isolation
deepspeed`` (tried: 0.19.8, which wants setuptools and wheel installed first).
"""

import os
import warnings
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import save, settings
from benchmarks.networks import Case, Network
from benchmarks.peer import Peer, Running, cases, child, is_child, measure

TITLE = "Beside DeepSpeed's ZeRO-3 with CPU offload, on the CPU, at no more memory than it takes"
OPTIMIZERS = ("torch", "DeepSpeed")


def main() -> None:
    """Measure all cases, or in a child process the memory of one side."""
    if is_child():
        child(DEEPSPEED)
        return
    chosen = settings("cpu", rounds=7)
    if not is_installed():
        return
    prepare()
    rows = (measure(DEEPSPEED, case, name, chosen) for case in cases(chosen.quick) for name in OPTIMIZERS)
    save("beside_deepspeed", TITLE, chosen, rows, deepspeed=metadata.version("deepspeed"), optimizer="AdamW")


def is_installed() -> bool:
    """Whether DeepSpeed is there; a line says so where it is not."""
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed, so nothing is measured: see the head of benchmarks/beside_deepspeed.py")
        return False
    return True


def start(network: Network, case: Case, optimizer: str) -> Running:
    """`trained` with the case's batch."""
    return trained(network, case.batch(), optimizer)


def trained(network: Network, batch: tuple[Tensor, Tensor], optimizer: str) -> Running:
    """The ZeRO-3 engine with AdamW, as DeepSpeed's documentation shows it."""
    x, targets = batch
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
    deepspeed = import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=network, optimizer=mine, config=config)

    def step() -> None:
        engine.backward(engine(x, targets))  # the engine clears gradients in its step
        engine.step()

    return Running(step, engine.destroy, lambda shown: deepspeed.zero.GatheredParameters(list(shown.parameters())))


def prepare(rank: int = 0, ranks: int = 1) -> None:
    """What DeepSpeed needs before it can be imported and used in a process; it joins a group that is there."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}  # as its launcher: it then shares memory
    warnings.filterwarnings("ignore", category=FutureWarning)  # its calls of torch.distributed by older names
    deepspeed = import_module("deepspeed")
    import_module("logging").getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _other_port() -> dict[str, str]:
    """For a child while this process listens at its own."""
    return {"MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}


DEEPSPEED = Peer("DeepSpeed", "benchmarks.beside_deepspeed", "its optimizer", OPTIMIZERS, start, prepare, _other_port)


if __name__ == "__main__":
    main()
