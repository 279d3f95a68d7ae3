"""Several processes: chains, loops and programs are exact in DistributedDataParallel, streamed models are refused."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from living import one_process
from streaming import DIRECT
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, InputError

__all__ = ["one_process"]  # a fixture

Averaged = nn.parallel.DistributedDataParallel
pytestmark = pytest.mark.on_cpu("c10d knows no simulated GPU")


class Around(nn.Module):
    """What trainers make: a module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Front(nn.Module):
    """A body of blocks, called by itself or by a front end."""

    def __init__(self, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.body = layers()
        self.call = call(self.body)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


FRONTS: dict[str, Callable[[Any], Any]] = {  # in budgets that make them recompute
    "chain": lambda body: ts.Chain([*body], budget=20_000),
    "loop": lambda body: _repeated(ts.Loop(body, budget=48_000)),
    "program": lambda body: ts.Program(lambda x: body(x), budget=24_000),
}


def _repeated(loop: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: loop(x, steps=3)


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])


def gradients(model: nn.Module, rank: int, calls: int = 2) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for k in range(calls):
        model.zero_grad()
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank + 10 * k))
        model(x).square().mean().backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def least(run: Callable[[int], Any]) -> Any:
    budget = 1
    while True:
        try:
            return run(budget)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = max(budget + 1, error.least_nbytes)


def test_without_gradients_in_several(monkeypatch: pytest.MonkeyPatch, one_process: None) -> None:
    model, x = ts.stream(layers(), budget="1MiB", device="cpu"), torch.randn(3, 16)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with torch.no_grad():
        assert torch.equal(model(x), layers()(x))
    with pytest.raises(
        InputError, match=r"group of 4 processes.*peers=ts.Peers\(\)\).*without torch.distributed.init_proc"
    ):
        model(x)
    model.requires_grad_(False)  # a teacher: nothing to average
    model(x.requires_grad_()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("how", ["around", "inside"])
@pytest.mark.parametrize("home", ["disk", "device"])
def test_one_process(how: str, home: str, tmp_path: Path, one_process: None) -> None:
    theirs = gradients(Averaged(layers()), 0)

    def ours(budget: int | str) -> list[Any]:
        folder = {"folder": tmp_path} if home == "disk" else {}
        options: dict[str, Any] = {"budget": budget, "device": "cpu", "home": home, "machine": DIRECT, **folder}
        model = layers()
        ours = ts.stream(Averaged(model) if how == "inside" else model, **options)
        ts.optimizer(ours, torch.optim.SGD, lr=0.1)
        try:
            return gradients(ours if how == "inside" else Averaged(Around(ours)), 0)
        finally:
            ts.unstream(ours)

    assert same(ours("1MiB"), theirs)
    if home == "device":
        assert same(least(ours), theirs)
    else:
        with pytest.raises(InputError, match=r"inside of DistributedDataParallel, or holds one.*leave it out"):
            least(ours)


def test_two_calls_before_one_backward(one_process: None, tmp_path: Path) -> None:
    model = ts.stream(layers(), budget=ts.Budget("1MiB", calls=2), device="cpu", home="device")
    averaged, x = Averaged(Around(model)), torch.randn(3, 16)
    first = averaged(x)
    with pytest.raises(InputError, match="leave it out"):
        averaged(x)
    first.sum().backward()


def test_nothing_left_to_average(one_process: None) -> None:
    model = ts.stream(layers(), budget="1MiB", device="cpu")
    for module in (model, model[0]):
        with pytest.raises(InputError, match=r"all that is trained is streamed.*leave it out"):
            Averaged(module)


def test_copies_to_several_devices() -> None:
    model = ts.stream(layers(), budget="1MiB", device="cpu")
    with pytest.raises(InputError, match=r"copy a streamed Sequential to several devices.*leave DataParallel out"):
        model._replicate_for_data_parallel()


def rank_of_two(rank: int, folder: str, said: Any) -> None:
    """What one of two processes finds."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found: dict[str, object] = {}
    for name, front in FRONTS.items():
        plain = (lambda body: lambda x: body(body(body(x)))) if name == "loop" else (lambda body: body)
        theirs = gradients(Averaged(Front(plain)), rank, 1)
        found[name] = same(gradients(Averaged(Front(front)), rank, 1), theirs)

    def refusal(make: Callable[[], nn.Module]) -> str:
        try:
            gradients(make(), rank)
        except InputError as error:
            return str(error)
        return "taken"

    found["around"] = refusal(lambda: Averaged(Around(ts.stream(layers(), budget="1MiB", device="cpu"))))
    found["inside"] = refusal(lambda: ts.stream(Averaged(layers()), budget="1MiB", device="cpu"))
    found["alone"] = refusal(lambda: ts.stream(layers(), budget="1MiB", device="cpu"))
    found["direct"] = refusal(lambda: Averaged(ts.stream(layers(), budget="1MiB", device="cpu")))
    torch.distributed.destroy_process_group()
    said.send(found)


@pytest.mark.filterwarnings("ignore:This process")  # newer Pythons warn of forks beside threads
def test_two_processes(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    pipes = [forked.Pipe(duplex=False) for _ in range(2)]
    children = [forked.Process(target=rank_of_two, args=(k, str(tmp_path), pipes[k][1])) for k in range(2)]
    for child in children:
        child.start()
    try:
        found = [pipes[k][0].recv() if pipes[k][0].poll(150) else {} for k in range(2)]
    finally:
        for child in children:
            child.kill()
            child.join()
    for one in found:
        assert [one.get(name) for name in FRONTS] == [True] * len(FRONTS)
        for name in ("around", "inside", "alone"):
            assert "called for training in a process group of 2 processes" in one[name]
        assert "asked to average the gradients of a streamed Sequential over 2 processes" in one["direct"]
