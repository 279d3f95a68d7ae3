"""What living with a streamed model takes: a process group of one, and memory as the process has it."""

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """This process as a group of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def own_nbytes() -> int:
    """Bytes of memory that belong to this process alone; pages of files do not."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024
