"""Runs a function in several processes of one gloo group."""

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

SECONDS = 60
TWO, FOUR = (pytest.param(size, marks=pytest.mark.full) for size in (2, 4))  # ranks, beside three


def in_ranks(
    size: int, run: Callable[..., Any], *args: Any, seconds: float = SECONDS, timeout: float = 30
) -> list[Any]:
    """What ``run(rank, size, *args)`` returns in each, or the exception that it raised (as its class's name and text).

    ``timeout``: the group's, in seconds.
    """
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes = [forked.Pipe(duplex=False) for _ in range(size)]
        children = [
            forked.Process(target=_rank, args=(k, size, folder, pipes[k][1], timeout, run, args), daemon=True)
            for k in range(size)
        ]
        for child in children:
            child.start()
        for _, end in pipes:
            end.close()
        try:
            return [_said(pipe, seconds) for pipe, _ in pipes]
        finally:
            for child in children:
                child.kill()
                child.join()


def _said(pipe: Any, seconds: float) -> Any:
    if not pipe.poll(seconds):
        return "nothing: it hangs"
    try:
        return pipe.recv()
    except EOFError:
        return "nothing: it ended"


def _rank(
    rank: int, size: int, folder: str, said: Any, timeout: float, run: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        found = run(rank, size, *args)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        if type(error).__module__ != "tapestream.errors":
            traceback.print_exc()
    said.send(found)
    said.close()
