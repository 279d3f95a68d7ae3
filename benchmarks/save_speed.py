"""Claim: saving a model takes at most 1.2 times its bytes over the disk's bandwidth.

Bytes: what must be read and what must be written. A model at home in RAM is only written; one at home on disk is read
first, as far as the system has not kept it in memory, from the disk that is written to. The reference moves exactly
these bytes as fast as this disk lets a program: from and to a buffer, past the page cache and through it, whichever is
faster, then fsync. The sides run in turn, each first as often as the others and after a second of rest: a disk may lend
speed that what comes next has to give back. The save also makes checksums. The save before is removed behind, which is
timed apart.
"""

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, mebibytes, write, yes
from tapestream.frontends.saving.folder import Saves
from tapestream.models import GPT, GPTConfig

TITLE = "Saving a streamed model, against moving as many bytes"
_PIECE = 16 * 2**20  # bytes per write
MOST = 1.2


def main() -> None:
    """Measure models of several sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--rounds", type=int, default=9, help="rounds A B A B ...")
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
    """A row per model and home."""
    for layers, width in ((2, 64),) if chosen.quick else ((6, 512), (12, 1024)):
        for home in ("device", "disk"):
            with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
                config = GPTConfig(layers, width, width // 64, vocabulary=4096, context=64)
                yield _measure(config, home, Path(folder), chosen)


def _measure(config: GPTConfig, home: str, folder: Path, chosen: Settings) -> Row:
    with torch.device("meta"):
        model = GPT(config)
    place = {"folder": folder / "home"} if home == "disk" else {}
    budget = max(64 * 2**20, 60 * config.block_parameters) if home == "disk" else 32 * config.parameters + 2**28
    ts.stream(model, device="cpu", budget=budget, home=home, **place)
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward", lr=1e-3)
    tokens = torch.zeros(1, 64, dtype=torch.long)

    def train() -> None:
        model(tokens, tokens).backward()
        optimizer.step()

    train()

    def save() -> Path:
        return ts.save(folder / "saves", model=model, optimizer=optimizer, keep=1)

    read, written, removal = 0, 0, list[float]()

    def ours() -> float:
        nonlocal read, written
        train()  # what it leaves in the page cache is what a save finds there
        _rest()
        before = _moved_nbytes()
        seconds = _seconds(save)
        removal.append(_seconds(Saves(folder / "saves").settle))
        read, written = (now - then for now, then in zip(_moved_nbytes(), before, strict=True))
        return seconds

    def theirs(flags: int) -> float:
        _rest()
        return _move(folder, read, written, flags)

    ways = {"past the cache": partial(theirs, os.O_DIRECT), "through the cache": partial(theirs, 0)}
    sides: list[tuple[str, Callable[[], float]]] = [("ts.save", ours), *ways.items()]
    ours()
    rounds = []
    for _ in range(chosen.rounds):
        rounds.append({name: side() for name, side in sides})
        sides.append(sides.pop(0))
    ts.unstream(model)
    found = [one["ts.save"] / min(one["past the cache"], one["through the cache"]) for one in rounds]
    return {
        "network": f"GPT, {config.layers} blocks of width {config.width}", "home": "RAM" if home == "device" else home,
        "written MiB": mebibytes(written), "read MiB": mebibytes(read),
        **{f"{name}, s": round(median(one[name] for one in rounds), 3) for name in ("ts.save", *ways)},
        "removal behind, s": round(median(removal), 3),
        "ratio": round(median(found), 3), "from": round(min(found), 3), "to": round(max(found), 3),
        "claim": f"at most {MOST}", "met": yes(median(found) <= MOST),
    }  # fmt: skip


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _rest() -> None:
    """Let the disk end what it still does, and what it accounts for."""
    os.sync()
    time.sleep(1)


def _moved_nbytes() -> tuple[int, int]:
    """Bytes that this process has had read from, and written to, disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _move(folder: Path, read: int, written: int, flags: int) -> float:
    """Seconds to write ``written`` bytes to the disk with these flags and meanwhile read ``read`` from it."""
    source, target = folder / "source", folder / "target"
    if not source.exists():
        _write(source, max(read, written), os.O_DIRECT)  # and so not in the cache
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for job in threads.submit(_read, source, read), threads.submit(_write, target, written, flags):
            job.result()
    seconds = time.perf_counter() - begin
    target.unlink()
    return seconds


def _write(path: Path, nbytes: int, flags: int) -> None:
    buffer = mmap.mmap(-1, _PIECE)
    buffer[:] = os.urandom(_PIECE)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    for start in range(0, nbytes, _PIECE):
        os.pwrite(file, buffer, start)
    os.fsync(file)
    os.close(file)


def _read(path: Path, nbytes: int) -> None:
    buffer = mmap.mmap(-1, _PIECE)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for start in range(0, nbytes, _PIECE):
        os.preadv(file, [buffer], start)
    os.close(file)


if __name__ == "__main__":
    main()
