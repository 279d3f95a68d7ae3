"""What the benchmarks of several processes share: the processes of one gloo group, and a step of one rank."""

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import Case


def in_ranks(ranks: int, folder: str, run: Callable[..., Any], *given: Any) -> list[Any]:
    """What ``run(rank, ranks, empty_folder, *given)`` returns in each rank: a process with one thread each."""
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=folder) as own:
        receive, send = forked.Pipe(duplex=False)
        children = [forked.Process(target=_rank, args=(k, ranks, own, send, run, given)) for k in range(ranks)]
        for child in children:
            child.start()
        send.close()
        try:
            said = dict(receive.recv() for _ in range(ranks))
        finally:
            for child in children:
                child.join()
    return [said[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, said: Any, run: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    said.send((rank, run(rank, ranks, folder, *given)))
    torch.distributed.destroy_process_group()


def batch_of(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """Of this rank alone: ``case.batch()`` would give all ranks the same."""
    torch.manual_seed(100 + rank)
    return case.make_batch()


def stepper(rank: int, case: Case, module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """One training step of one rank as a function."""
    x, targets = batch_of(rank, case)

    def step() -> None:
        optimizer.zero_grad()
        module(x, targets).backward()
        optimizer.step()

    return step
