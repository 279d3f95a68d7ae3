"""What torchrun starts in `test_ranks`: ranks that share one GPU, and gloo, which knows only tensors of the CPU."""

import hashlib
import json
import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "peers")]

if os.environ.get("TAPESTREAM_SIMULATED"):
    from simulated_gpu import load

    load()  # before PyTorch

import torch
from trainings import Net, batch, leave_out, made

import tapestream as ts
from tapestream.peers import agreement
from tapestream.peers.collectives import Collectives, Pending

WAYS = {
    "copies": (ts.Peers(), "host", "300KiB", "step"),
    "divided": (ts.Peers(shard=True), "host", "300KiB", "step"),
    "disk": (ts.Peers(shard=True), "disk", "300KiB", "backward"),
    "device": (ts.Peers(shard=True), "device", "1GiB", "step"),
}


class Asynchronous(Collectives):
    """What is sent waits for what was issued before and runs beside what is issued afterwards, on a stream of its own,
    as by NCCL: memory that is used, or given away, before it was waited for would show."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._stream, self._thread = torch.cuda.Stream(), ThreadPoolExecutor(1)  # all that is sent, in one order

    def _begun(self, operation: Any, target: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._later(lambda: super(Asynchronous, self)._begun(operation, target, source).wait())

    def _in_place(self, tensor: torch.Tensor, operation: Any) -> None:
        self._later(lambda: super(Asynchronous, self)._in_place(tensor, operation)).wait()

    def _later(self, work: Any) -> "Later":
        ready = torch.cuda.current_stream().record_event()

        def run() -> torch.Event:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                work()
                return self._stream.record_event()

        return Later(self._thread.submit(run))


class Later:
    def __init__(self, event: "Future[torch.Event]") -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event.result())


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
    if os.environ.get("TAPESTREAM_ASYNCHRONOUS"):
        agreement.Collectives = Asynchronous
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {"plain": plain(ranks)} | {name: streamed(rank, *way) for name, way in WAYS.items()}
    Path(said, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
