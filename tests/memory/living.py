"""What users do with a model beside training it, in a process of its own: ``python living.py JSON ..``; prints what it
has seen as JSON, a line for each. The gradients are clipped; states of model and optimizer are saved, and loaded again
a step later."""

import hashlib
import json
import mmap
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from step import batch, status

import tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig


def made(job: dict[str, Any], layers: int, budget: int | str) -> tuple[torch.nn.Module, Any]:
    config = GPTConfig(layers, job["width"], 8, vocabulary=256, context=job["length"])
    if not job["streamed"]:
        model = GPT(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.device("meta"):
        hollow = GPT(config)
    streamed = ts.stream(hollow, device="cpu", budget=budget, folder=job["folder"])
    return streamed, ts.optimizer(streamed, torch.optim.AdamW, lr=1e-3)


def step(model: torch.nn.Module, optimizer: Any, number: int, length: int) -> list[str]:
    loss = model(*batch(number, length))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [float(loss.detach()).hex(), float(norm).hex()]


def live(job: dict[str, Any], layers: int, budget: int | str) -> tuple[list[list[str]], str]:
    model, optimizer = made(job, layers, budget)
    saved, length = Path(job["saved"]), job["length"]
    seen = [step(model, optimizer, 0, length)]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    seen.append(step(model, optimizer, 1, length))
    states = torch.load(saved, mmap=True, weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    del states
    seen.append(step(model, optimizer, 1, length))
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *_moments(optimizer)):
        digest.update(tensor.detach().numpy().tobytes())
    return seen, digest.hexdigest()


def _moments(optimizer: Any) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [states[number][name] for number in sorted(states) for name in sorted(states[number])]


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)  # the file's pages are not this process's own
    # Threads, pools and kernels exist before the limit is set: a small run first.
    live(job, 2, "1 GiB")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if job["allowed"]:
        limit = status()["VmData"] + job["allowed"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        seen, digest = live(job, job["layers"], job["budget"])
        print(json.dumps({"seen": seen, "digest": digest}))
    except (RuntimeError, MemoryError) as error:
        print(json.dumps({"failed": str(error).splitlines()[0]}))
    finally:  # the next job has a limit of its own
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(json.loads(argument))
