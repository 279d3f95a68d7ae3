"""Sends a model from memory to disk in a process of its own: ``python wrap.py FOLDER``; prints what it has seen as
JSON."""

import json
import sys
from pathlib import Path

import torch
from step import status

import tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig


def main(folder: str) -> None:
    torch.set_num_threads(1)
    model = GPT(GPTConfig(12, 512, 8, vocabulary=64, context=8))
    # Threads, pools and imports exist before memory is measured: a small one first.
    ts.stream(GPT(GPTConfig(2, 64, 8, vocabulary=64, context=8)), device="cpu", folder=folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = status()["VmRSS"]
    ts.stream(model, device="cpu", folder=folder)
    after = status()
    sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    print(json.dumps({"extra": after["VmHWM"] - before, "freed": before - after["VmRSS"], "sizes": sizes}))


if __name__ == "__main__":
    main(sys.argv[1])
