"""A few training steps in a process of its own, under a hard limit: ``python step.py JSON ..``; prints what it has
seen as JSON, a line for each."""

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig


def status() -> dict[str, int]:
    """Bytes of this process, as the system counts them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def batch(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 256, (1, length), generator=generator) for _ in range(2))  # type: ignore[return-value]


def train(job: dict[str, Any], layers: int, streamed: bool, folder: str) -> tuple[list[str], torch.nn.Module]:
    config = GPTConfig(layers, job["width"], 8, vocabulary=256, context=job["length"])
    if streamed:
        with torch.device("meta"):
            hollow = GPT(config)
        model = ts.stream(hollow, device="cpu", budget=job["budget"], folder=folder)
        optimizer: Any = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=job["update"])
    else:
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(job["steps"]):
        loss = model(*batch(step, job["length"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses, model


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # Threads, pools and kernels exist before the limit is set: a small run first.
    train({**job, "budget": "1 GiB", "steps": 1}, 2, job["streamed"], job["folder"])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if job["allowed"]:
        limit = status()["VmData"] + job["allowed"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = status()["VmRSS"]
    try:
        losses, model = train(job, job["layers"], job["streamed"], job["folder"])
    except (RuntimeError, MemoryError) as error:
        print(json.dumps({"failed": str(error).splitlines()[0]}))
        return
    finally:  # the next job has a limit of its own
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resident = status()["VmHWM"] - before
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps({"losses": losses, "resident": resident, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(json.loads(argument))
