"""Claim (d): beside RamTorch (``pip install --no-deps ramtorch``) on the CPU, no more memory and no more time.

RamTorch's `OffloadModel` runs on the CPU, where its copies become clones. Each of its three ways to treat activations
is measured, as `benchmarks.peer` says.
"""

import tempfile
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import save, settings
from benchmarks.networks import Case, Network, gpt
from benchmarks.peer import Peer, Running, cases, child, is_child, measure

TITLE = "Beside RamTorch on the CPU, at no more memory than it takes"
MODES: dict[str, bool | str] = {"keep": True, "recompute": False, "checkpoint": "checkpoint"}


def main() -> None:
    """Measure all modes, or in a child process the memory of one side."""
    if is_child():
        child(RAMTORCH)
        return
    chosen = settings("cpu", rounds=7)
    if find_spec("ramtorch") is None:
        print("RamTorch is not installed, so nothing is measured: pip install --no-deps ramtorch")
        return
    rows = (measure(RAMTORCH, case, mode, chosen) for case in cases(chosen.quick) for mode in MODES)
    save(
        "beside_ramtorch", TITLE, chosen, rows, ramtorch=metadata.version("ramtorch"), window=2,
        optimizer="AdamW (fused)", disk_tier=_disk_tier(chosen.folder),
    )  # fmt: skip


def start(network: Network, case: Case, mode: str) -> Running:
    """RamTorch's OffloadModel with AdamW, as its documentation shows it."""
    x, targets = case.batch()
    chunks: list[nn.Module] = [network.before, *network.blocks, network.after]
    model = import_module("ramtorch").OffloadModel(chunks, device="cpu", window=2, keep_activations=MODES[mode])
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), wanted.flatten())

    def step() -> None:
        optimizer.zero_grad()
        model.step(x, targets=targets, loss_fn=loss)
        model.flush_grads()
        optimizer.step()

    return Running(step, model.close)


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


def _prepare() -> None:
    import_module("ramtorch")


RAMTORCH = Peer("RamTorch", "benchmarks.beside_ramtorch", "RamTorch's way", tuple(MODES), start, _prepare)


if __name__ == "__main__":
    main()
