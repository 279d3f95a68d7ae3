"""Claim: saving a streamed model takes at most 1.2 times its bytes over the disk's bandwidth.

Both sides write the same bytes to the same disk, in turn: `tapestream.save` of a GPT at home on disk with its AdamW
state, and plain writes in pieces of 16 MiB from memory. Both are followed by fsync. The save reads its bytes from that
disk first, and adds checksums.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, alternate, mebibytes, write, yes
from tapestream.models import GPT, GPTConfig

TITLE = "Saving a streamed model, against writing as many bytes"
_PIECE = 16 * 2**20  # bytes per write
MOST = 1.2


def main() -> None:
    """Measure models of several sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--rounds", type=int, default=5, help="rounds A B A B ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is written to")
    parser.add_argument("--output", default=str(RESULTS), help="folder of the result file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rounds = 2 if given.quick else given.rounds
    chosen = Settings("cpu", given.quick, rounds, given.threads, not given.quick, given.folder)
    rows = []
    for row in measured(chosen):
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
    if chosen.save:
        write("save_speed", TITLE, chosen, rows, Path(given.output), optimizer="AdamW")


def measured(chosen: Settings) -> Iterator[Row]:
    """A row per model."""
    for layers, width in ((2, 64),) if chosen.quick else ((6, 512), (12, 1024)):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            yield _measure(GPTConfig(layers, width, width // 64, vocabulary=4096, context=64), Path(folder), chosen)


def _measure(config: GPTConfig, folder: Path, chosen: Settings) -> Row:
    with torch.device("meta"):
        model = GPT(config)
    budget = max(64 * 2**20, 60 * config.block_parameters)
    ts.stream(model, device="cpu", budget=budget, folder=folder / "home")
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward", lr=1e-3)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()

    def save() -> Path:
        return ts.save(folder / "saves", model=model, optimizer=optimizer, keep=1)

    nbytes = sum(path.stat().st_size for path in save().rglob("*") if path.is_file())
    data = os.urandom(_PIECE)

    def plain() -> None:
        with (folder / "plain").open("wb", buffering=0) as file:
            for start in range(0, nbytes, _PIECE):
                file.write(data[: nbytes - start])
            os.fsync(file.fileno())

    timings = alternate({"plain writes": plain, "ts.save": save}, chosen.rounds, "cpu")
    found = timings.ratio("ts.save", "plain writes")
    ts.unstream(model)
    shutil.rmtree(folder / "saves")
    return {
        "network": f"GPT, {config.layers} blocks of width {config.width}", "MiB": mebibytes(nbytes),
        "plain writes s": round(timings.seconds("plain writes"), 3), "ts.save s": round(timings.seconds("ts.save"), 3),
        **found, "claim": f"at most {MOST}", "met": yes(found["ratio"] <= MOST),
    }  # fmt: skip


if __name__ == "__main__":
    main()
