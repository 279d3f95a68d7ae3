"""What torchrun starts in `test_ranks`: ranks that share one GPU, and gloo, which knows only tensors of the CPU."""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "peers")]

if os.environ.get("TAPESTREAM_SIMULATED"):
    from simulated_gpu import load

    load()  # before PyTorch

import torch
from trainings import Net, batch, leave_out, made

import tapestream as ts

WAYS = {
    "copies": (ts.Peers(), "host", "300KiB", "step"),
    "divided": (ts.Peers(shard=True), "host", "300KiB", "step"),
    "disk": (ts.Peers(shard=True), "disk", "300KiB", "backward"),
    "device": (ts.Peers(shard=True), "device", "1GiB", "step"),
}


def digest(model: torch.nn.Module) -> str:
    found = (p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha1(b"".join(found)).hexdigest()


def plain(ranks: int) -> str:
    """One process that runs the batches of all ranks in turn."""
    model = made().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(ranks):
            leave_out(model, step, micro)
            gradients = torch.autograd.grad(
                model(batch(step, micro).to("cuda")), list(model.parameters()), allow_unused=True
            )
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient * (1 / ranks) if p.grad is None else p.grad.add_(gradient * (1 / ranks))
        optimizer.step()
    return digest(model)


def streamed(rank: int, peers: ts.Peers, home: str, budget: str, update: Any) -> str:
    model: Net = made(1 + rank)
    with tempfile.TemporaryDirectory() as folder:
        where = {"folder": folder} if home == "disk" else {}
        model = ts.stream(model, device="cuda", budget=budget, home=home, peers=peers, **where)
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=0.01, foreach=False, update=update)
        for step in range(3):
            optimizer.zero_grad()
            leave_out(model, step, rank)
            model(batch(step, rank).to("cuda")).backward()
            optimizer.step()
        model.left_out.clear()
        with torch.no_grad():
            model(batch(9, 0).to("cuda"))
        ts.unstream(model)
    return digest(model)


def main(said: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {"plain": plain(ranks)} | {name: streamed(rank, *way) for name, way in WAYS.items()}
    Path(said, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
