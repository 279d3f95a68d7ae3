"""What is done on a disk that is full, or read-only, each beside the same by plain PyTorch. Run with a folder as
argument, and the right to mount: prints, as JSON, by name what went wrong (null: nothing did)."""

import contextlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tapestream as ts

LINKS = ts.Machine({
    (ts.Tier.DISK, ts.Tier.DEVICE): ts.Link(1e9), (ts.Tier.DEVICE, ts.Tier.DISK): ts.Link(1e9),
})  # fmt: skip
BLOCKS, WIDTH = 6, 128
Losses = list[torch.Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def batch(step: int, samples: int = 16) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def streamed_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return ts.optimizer(model, torch.optim.AdamW, lr=1e-2)


def streamed(folder: Path, budget: str = "700KiB") -> nn.Module:
    model = network()
    return ts.stream(model, budget=budget, folder=folder, home="disk", device="cpu", machine=LINKS)


def same(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = dict(model.state_dict()), dict(other.state_dict())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@contextlib.contextmanager
def full(folder: Path, left: int = 4096) -> Iterator[None]:
    """Nothing is left of its file system but so many bytes."""
    ballast = folder / "ballast"
    usage = os.statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, usage.f_bavail * usage.f_frsize - left))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Its file system is, which root cannot write to either."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


@contextlib.contextmanager
def refused(*words: str, surely: bool = True) -> Iterator[None]:
    """By name, in one line that says what to do; not ``surely``: if at all."""
    try:
        yield
    except ts.StorageError as error:
        said = str(error)
        assert "\n" not in said, said
        assert all(word in said for word in words), said
    else:
        assert not surely, "it was not refused"


def full_when_streaming(folder: Path) -> None:
    model = network()
    with full(folder), refused("make room", "choose another folder"):
        ts.stream(model, budget="700KiB", folder=folder, home="disk", device="cpu", machine=LINKS)
    same(model, network())
    assert type(model) is nn.Sequential
    plain = network()
    for one in (model, plain):
        trained(one, adamw(one), 0)
    same(model, plain)


def full_when_state_is_made(folder: Path) -> None:
    model, plain = streamed(folder), network()
    optimizers = None
    with full(folder), refused("make room"):
        ours = streamed_adamw(model)
        optimizers = ours
        trained(model, ours, 0)
    same(model, network())
    optimizer = streamed_adamw(model) if optimizers is None else optimizers
    optimizer.zero_grad()
    theirs = adamw(plain)
    for step in range(2):
        trained(model, optimizer, step)
        trained(plain, theirs, step)
    ts.unstream(model)
    same(model, plain)


def full_when_state_is_made_then_unstreamed(folder: Path) -> None:
    model = streamed(folder)
    with full(folder):
        with refused("make room"):
            trained(model, streamed_adamw(model), 0)
        ts.unstream(model)
        same(model, network())
        plain = network()
        model.zero_grad()
        for one in (model, plain):
            trained(one, adamw(one), 0)
        same(model, plain)


def full_while_training(folder: Path) -> None:
    """All that is written has its place already."""
    model, plain = streamed(folder), network()
    ours, theirs = streamed_adamw(model), adamw(plain)
    for step in range(4):
        with full(folder) if step else contextlib.nullcontext():
            trained(model, ours, step)
        trained(plain, theirs, step)
    with full(folder):
        ts.unstream(model)
    same(model, plain)


def full_when_saving(folder: Path) -> None:
    saves = folder / "saves"
    model, plain = streamed(folder), network()
    ours, theirs = streamed_adamw(model), adamw(plain)
    trained(model, ours, 0)
    trained(plain, theirs, 0)
    first = ts.save(saves, model=model, optimizer=ours, keep=1)
    trained(model, ours, 1)
    trained(plain, theirs, 1)
    with full(folder), refused():
        ts.save(saves, model=model, optimizer=ours, keep=1)
    assert list(saves.iterdir()) == [first], list(saves.iterdir())
    trained(model, ours, 2)
    trained(plain, theirs, 2)
    same(model, plain)
    ts.load(saves, model=model, optimizer=ours)
    again, optimizer = network(), None
    optimizer = adamw(again)
    for step in (0, 7):
        trained(again, optimizer, step)
    trained(model, ours, 7)
    ts.unstream(model)
    same(model, again)


def full_when_states_spill(folder: Path) -> None:
    stages = list(network())
    chain = ts.Chain(stages, budget="140KiB", folder=folder, device="cpu", machine=LINKS, planner="offload")
    x = batch(0, 64).requires_grad_()
    with full(folder), refused("make room"):
        chain(x).square().mean().backward()
    assert x.grad is None
    assert all(p.grad is None for p in chain.parameters())
    chain(x).square().mean().backward()
    assert any(chain.copies.bytes_moved.values())
    plain, y = network(), batch(0, 64).requires_grad_()
    plain(y).square().mean().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(chain.parameters(), plain.parameters(), strict=True))


def full_when_a_loop_spills(folder: Path) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    loop = ts.Loop(
        lambda s: torch.tanh(layer(s)), budget="200KiB", folder=folder, machine=LINKS, planner="async_multistage"
    )
    x = batch(0).requires_grad_()
    with full(folder), refused("make room"):
        loop(x, 100).sum().backward()
    assert x.grad is None
    loop(x, 100).sum().backward()
    y = z = batch(0).requires_grad_()
    for _ in range(100):
        z = torch.tanh(layer(z))
    z.sum().backward()
    assert torch.equal(x.grad, y.grad)


def full_when_a_program_spills(folder: Path) -> None:
    net, plain = network(), network()
    program = ts.Program(
        lambda x: net(x).square().mean(), budget="260KiB", folder=folder, device="cpu", machine=LINKS, planner="offload"
    )
    for step in range(3):
        with full(folder) if step == 1 else contextlib.nullcontext():
            refusing = refused("make room") if step == 1 else contextlib.nullcontext()
            with refusing:
                program(batch(step, 64)).backward()
        if step != 1:
            plain(batch(step, 64)).square().mean().backward()
    assert any(program.copies.bytes_moved.values())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True))


def loss_of(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def full_when_accumulating(folder: Path) -> None:
    """The first gradients that live on the disk find no place: the call is lost, and not what was there before."""
    model, plain = streamed(folder, "500KiB"), network()
    given = [batch(k) for k in range(3)]
    with full(folder), refused("make room", surely=False):
        ts.accumulate(model, given, loss_of)
    model.zero_grad()
    ours, theirs = streamed_adamw(model), adamw(plain)
    for step in range(2):
        with full(folder) if step else contextlib.nullcontext():
            ts.accumulate(model, given, loss_of)
        for one in given:
            loss_of(plain(one), one).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    ts.unstream(model)
    same(model, plain)


def read_only_when_streaming(folder: Path) -> None:
    model = network()
    with read_only(folder), refused("Read-only file system", "writing is not permitted; choose another folder"):
        ts.stream(model, budget="700KiB", folder=folder, home="disk", device="cpu", machine=LINKS)
    same(model, network())
    assert type(model) is nn.Sequential


def read_only_when_saving(folder: Path) -> None:
    model = network()
    first = ts.save(folder / "saves", model=model)
    with read_only(folder):
        with refused("Read-only file system"):
            ts.save(folder / "saves", model=model)
        ts.load(folder / "saves", model=model)
    assert list((folder / "saves").iterdir()) == [first]


def read_only_when_states_spill(folder: Path) -> None:
    chain = ts.Chain(list(network()), budget="140KiB", folder=folder, device="cpu", machine=LINKS, planner="offload")
    x = batch(0, 64).requires_grad_()
    with read_only(folder), refused("Read-only file system"):
        chain(x).square().mean().backward()
    assert all(p.grad is None for p in chain.parameters())
    chain(x).square().mean().backward()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    name: one for name, one in list(vars().items()) if name.startswith(("full_w", "read_only_w"))
}


def main(folder: Path) -> None:
    """Run all of them, or those that are named."""
    warnings.simplefilter("error")
    found: dict[str, str | None] = {}
    for number, name in enumerate(sys.argv[2:] or SCENARIOS):
        place = folder / str(number)
        subprocess.run(["mkdir", str(place)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
        try:
            SCENARIOS[name](place)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
