"""A process in which all that only Linux has is hidden: ``python without_linux.py SCENARIO,.. FOLDER``.

Open files, and folders with open files in them, can be neither removed nor renamed, as on Windows. PyTorch, psutil and
filelock have versions for other systems, and are let see which one this is.
"""

import builtins
import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

FOR_UNIX = (
    "O_DIRECT", "O_DIRECTORY", "O_CLOEXEC", "O_NOFOLLOW", "O_TMPFILE", "pread", "pwrite", "preadv", "pwritev",
    "posix_fallocate", "posix_fadvise", "fdatasync", "register_at_fork", "sched_getaffinity", "statvfs", "fork",
)  # fmt: skip
FOR_LINUX_FROM_C = {"mallopt", "malloc_trim", "mallinfo2", "madvise", "syscall", "sync_file_range"}
LET_SEE = ("torch", "psutil", "filelock")
LISTED, LINK = os.listdir, os.readlink
TEMPORARY = 1 << 29


def trusted() -> bool:
    frame, names = sys._getframe(2), []
    while frame is not None and len(names) < 4:
        names.append(str(frame.f_globals.get("__name__", "")).split(".")[0])
        frame = frame.f_back
    return any(name in LET_SEE for name in names)


def in_use() -> Iterator[str]:
    """Files that are open or mapped."""
    for number in LISTED("/proc/self/fd"):
        try:
            yield LINK(f"/proc/self/fd/{number}")
        except OSError:
            continue
    with TRULY_OPEN("/proc/self/maps") as lines:
        yield from (line.split(maxsplit=5)[5].strip() for line in lines if "/" in line)


TRULY_OPEN = builtins.open


def hide() -> None:
    room = os.statvfs

    def disk_usage(path: Any) -> Any:
        found = room(path)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return shutil._ntuple_diskusage(total, total - free, free)

    shutil.disk_usage = disk_usage
    shutil._use_fd_functions = False  # as there
    for name in ("fcntl", "resource", "msvcrt"):
        sys.modules[name] = None  # type: ignore[assignment]
    del psutil.Process.rlimit
    for module, names in (
        (psutil, [name for name in dir(psutil) if name.startswith("RLIM")]),
        (os, FOR_UNIX), (signal, ("SIGUSR1", "SIGUSR2", "SIGHUP")),
        (mmap, [name for name in dir(mmap) if name.startswith("MADV_")]),
    ):  # fmt: skip
        for name in names:
            delattr(module, name)
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "stat")):
        setattr(module, name, without_proc(getattr(module, name)))
    os.O_TEMPORARY = TEMPORARY  # type: ignore[attr-defined]
    os.open = temporary(os.open, os.unlink)  # type: ignore[assignment]
    for name in ("unlink", "remove", "rmdir", "rename", "replace"):
        setattr(os, name, not_in_use(getattr(os, name)))
    attribute = ctypes.CDLL.__getattr__

    def without(library: ctypes.CDLL, name: str) -> Any:
        if library._name is None and name in FOR_LINUX_FROM_C and not trusted():
            raise AttributeError(name)
        return attribute(library, name)

    ctypes.CDLL.__getattr__ = without  # type: ignore[method-assign]


def without_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any = ".", *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path) and not trusted():
            name = os.fsdecode(path)
            if name == "/proc" or name.startswith(("/proc/", "/sys/fs/cgroup")):
                raise FileNotFoundError(2, "No such file or directory", name)
        return call(path, *args, **options)

    return called


def temporary(call: Callable[..., int], remove: Callable[[Any], None]) -> Callable[..., int]:
    """Files that go with their descriptor, which Windows has."""

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        file = call(path, flags & ~TEMPORARY, *args, **options)
        if flags & TEMPORARY:
            remove(path)
        return file

    return opened


def not_in_use(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any, *args: Any, **options: Any) -> Any:
        name = os.path.realpath(path)
        if not trusted() and any(used == name or used.startswith(name + "/") for used in in_use()):
            raise PermissionError(13, "in use, as Windows says", name)
        return call(path, *args, **options)

    return called


# ----------------------------------------------------------------------------------------------------------- scenarios


def imports(_: Path) -> None:
    """Everything."""
    import tapestream

    for found in pkgutil.walk_packages(tapestream.__path__, "tapestream."):
        importlib.import_module(found.name)


def same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def functions(folder: Path) -> None:
    """`Chain` (also with a folder), `Loop` and `Program`, as plain PyTorch has it."""

    import tapestream as ts

    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]
    parameters = [p for stage in stages for p in stage.parameters()]
    x = torch.randn(64, 64)

    def gradients(function: Callable[..., Any], *args: Any) -> list[torch.Tensor]:
        for p in parameters:
            p.grad = None
        function(*args).square().mean().backward()
        return [p.grad for p in parameters if p.grad is not None]

    wanted = gradients(nn.Sequential(*stages), x)
    for knobs in ({}, {"folder": folder}, {"folder": folder, "planner": "async_multistage"}):
        chain = ts.Chain(stages, budget="192KiB", **knobs)
        same(gradients(chain, x), wanted)
        assert chain.plan.peak_nbytes <= 192 * 2**10

    def plain(tree: Any, x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    same(gradients(ts.Program(plain, budget="192KiB"), [], x), wanted)

    def step(state: Any) -> Any:
        return torch.tanh(stages[0](state)) + state

    def many(state: Any) -> Any:
        for _ in range(50):
            state = step(state)
        return state

    wanted = gradients(many, x)
    for knobs in ({}, {"folder": folder}):
        looped = ts.Loop(step, budget="256KiB", **knobs)
        same(gradients(lambda state, run=looped: run(state, steps=50), x), wanted)


def network() -> Any:

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    )


def train(model: Any, optimizer: Any, steps: range) -> list[Any]:
    losses = []
    for number in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def streams(folder: Path) -> None:
    """From files, two steps of AdamW; then saved, pushed out by the next save, and gone on with from there."""
    import tapestream as ts
    from tapestream.frontends.saving.folder import Saves
    from tapestream.storage import DiskFolder

    plain = network()
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(4))
    home, saves = folder / "home", folder / "saves"
    model = ts.stream(network(), device="cpu", home="disk", folder=home, budget="160KiB")
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=0.01)
    same(train(model, optimizer, range(2)), wanted[:2])
    for number in range(3):
        ts.save(saves, model=model, optimizer=optimizer, keep=1, step=number)
    Saves(saves).settle()
    assert [path.name for path in saves.iterdir()] == ["000003"], list(saves.iterdir())
    ts.unstream(model)
    del model, optimizer
    again = ts.stream(network(), device="cpu", home="disk", folder=home, budget="160KiB")
    optimizer = ts.optimizer(again, torch.optim.AdamW, lr=0.01)
    assert ts.load(saves, model=again, optimizer=optimizer)["step"] == 2
    same(train(again, optimizer, range(2, 4)), wanted[2:])
    ts.unstream(again)
    same(again.parameters(), plain.parameters())
    del optimizer
    gc.collect()
    DiskFolder(home).close()  # what was in use when it was to be removed goes with the next
    assert list(home.iterdir()) == [], list(home.rglob("*"))


def plans(_: Path) -> None:
    """The command."""
    from typer.testing import CliRunner

    from tapestream.cli.app import make_app

    shape = ["--layers", "6", "--width", "256", "--seq", "128", "--vocabulary", "512"]
    said = CliRunner().invoke(make_app(), ["plan", "gpt", *shape, "--budget", "40MiB", "--ram", "1GiB", "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["fits"] is True
    refused = CliRunner().invoke(make_app(), ["demo", "--quick", "--device", "cpu"])
    assert (refused.exit_code, "only Linux has" in refused.stderr) == (2, True), refused.output


def measures(folder: Path) -> None:
    """The disk, through the page cache."""
    from tapestream.planning.measure import measure_machine

    machine = measure_machine("cpu", folder, quick=True)
    assert all(link.bytes_per_second > 0 for link in machine.links.values())
    assert list(folder.iterdir()) == [], list(folder.iterdir())


def holds(folder: Path) -> None:
    """A folder of saves and a home, until somebody ends this process."""
    from tapestream.storage import DiskFolder
    from tapestream.storage.locked import held_alone

    home = DiskFolder(folder)
    extent = home.allocate(100_000)
    with held_alone(folder, ".running"):
        print(json.dumps({"pid": os.getpid(), "home": str(home.path)}), flush=True)
        sys.stdin.read()
    del extent


def asks(folder: Path) -> None:
    """For what another has: says how it is refused."""
    from tapestream.errors import StorageError
    from tapestream.storage import DiskFolder
    from tapestream.storage.disk import PREFIX
    from tapestream.storage.locked import dead_folders, held_alone

    said = []
    dead = [str(path) for path in dead_folders(folder, PREFIX)]
    for home in [path for path in folder.iterdir() if path.is_dir()]:
        try:
            DiskFolder(home).close()
        except StorageError as error:
            said.append(str(error))
    try:
        with held_alone(folder, ".running"):
            pass
    except StorageError as error:
        said.append(str(error))
    DiskFolder(folder).close()  # removes what is dead
    print(json.dumps({"said": said, "dead": dead, "left": [path.name for path in folder.iterdir()]}), flush=True)


if __name__ == "__main__":
    hide()
    for scenario in sys.argv[1].split(","):
        print(scenario, file=sys.stderr)  # for whoever reads where it failed
        globals()[scenario](Path(sys.argv[2]))
