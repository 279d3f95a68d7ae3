"""A chain's folder: whose it is, when it goes, what happens when the disk is full, slow or fails; homes and budgets."""

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import plain
from tiered import DEVICE, DISK, DISKS, HOST, HOSTS, moved_by
from torch import nn

import tapestream.executor.engines.threads as threads
import tapestream.frontends.below as below
from tapestream.costs import Budget
from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.frontends.chain import Chain
from tapestream.storage.kernel_queue import KernelQueue
from tapestream.storage.meter import track_memory
from tapestream.system import files

KNOBS: dict[str, Any] = {"planner": "offload", "tail": 2, "ahead": 1, "machine": DISKS}


def stages_of(depth: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth)]


def rows() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


def assert_exact(net: Chain, stages: list[nn.Module]) -> None:
    """One step by the chain and one by plain PyTorch give the same bits."""
    found = torch.autograd.grad(net(x := rows()).square().sum(), [x, *net.parameters()])
    wanted = torch.autograd.grad(plain(stages)(x).square().sum(), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_folder_is_made_when_something_moves_and_goes_with_the_chain(tmp_path: Path) -> None:
    net = Chain(stages := stages_of(), folder=tmp_path / "new", **KNOBS)
    assert not list(tmp_path.iterdir())
    assert_exact(net, stages)
    (run,) = (tmp_path / "new").iterdir()
    assert oct(run.stat().st_mode)[-3:] == "700"
    live, gone = net(rows()), weakref.ref(net)
    del net
    assert run.exists()  # the live call needs it
    live.sum().backward()
    del live
    gc.collect()
    assert gone() is None
    assert not run.exists()


def test_a_call_that_nobody_differentiates_gives_everything_back(tmp_path: Path) -> None:
    net = Chain(stages := stages_of(), folder=tmp_path, **KNOBS)
    out = net(rows())
    assert net._below is not None
    pool, _ = net._below._open()
    assert pool.held_nbytes(DISK) > 0
    del out
    gc.collect()
    assert not any(net._live.values())
    assert_exact(net, stages)
    assert pool.held_nbytes(DISK) == 0


def test_a_copy_has_a_folder_of_its_own(tmp_path: Path) -> None:
    net = Chain(stages_of(), folder=tmp_path, **KNOBS)
    net(rows()).sum().backward()
    other = copy.deepcopy(net)
    assert_exact(other, list(other.stages))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_raises_and_the_chain_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Chain(stages := stages_of(), folder=tmp_path, **KNOBS)
    with monkeypatch.context() as full:
        full.setattr(files, "free_nbytes", lambda path: 0)
        with pytest.raises(StorageError, match="No space left"):
            net(rows())
    assert not any(net._live.values())
    assert_exact(net, stages)


@pytest.mark.parametrize("number", [0, 2, 3, 5])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "thread"])
def test_a_copy_that_fails_raises_and_nothing_is_lost(
    number: int, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(threads, "open_queue", lambda: None)
    net = Chain(stages := stages_of(), folder=tmp_path, **KNOBS)
    net(rows()).sum().backward()
    before = [(p, p.detach().clone(), p.grad) for p in net.parameters()]
    finish, transfer, count = KernelQueue.finish, threads.transfer, iter(range(1000))

    def failing(*arguments: Any) -> None:
        if kernel or next(count) == number:
            raise StorageError("the disk broke")
        transfer(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(threads, "transfer", failing)
        broken.setattr(KernelQueue, "finish", lambda *these: -5 if next(count) == number else finish(*these))
        with pytest.raises(StorageError, match="the disk broke"):
            net(rows()).sum().backward()
    assert all(torch.equal(p, data) and p.grad is grad for p, data, grad in before)
    gc.collect()
    assert net._below is not None
    assert net._below._open()[0].held_nbytes(DISK) == 0
    assert_exact(net, stages)


@pytest.mark.parametrize("planner", ["offload", "async_multistage", "double"])
def test_writes_slower_than_many_steps_end_well(planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write takes longer than the whole sweep, each step longer than any queue would be polled for."""
    transfer = threads.transfer

    def slow(source: Any, target: Any, nbytes: int) -> None:
        time.sleep(0.05 if source.tier is DEVICE else 0.01)
        transfer(source, target, nbytes)

    class Pausing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.004)
            return torch.sin(x)

    monkeypatch.setattr(threads, "transfer", slow)
    monkeypatch.setattr(threads, "open_queue", lambda: None)
    knobs = {"offload": KNOBS, "async_multistage": {"slots": 1, "interval": 2}, "double": {"interval": 2, "segment": 1}}
    stages = [Pausing() for _ in range(10)]
    net = Chain(stages, folder=tmp_path, **{"planner": planner, "machine": DISKS, **knobs[planner]})
    assert_exact(net, list(stages))
    assert moved_by(net)[DEVICE, DISK] > 0


def test_live_calls_share_the_disk_budget(tmp_path: Path) -> None:
    needed = Chain(stages_of(), folder=tmp_path, **KNOBS)
    needed(rows())
    assert needed.plan is not None
    nbytes = needed.plan.simulation.peak_nbytes[DISK]
    net = Chain(stages_of(), folder=tmp_path, budget=Budget("1MiB", disk=nbytes), **KNOBS)
    first = net(rows())
    later = net(rows())  # the first one gives way: see test_giving_way
    with pytest.raises(BudgetError, match="DISK"):
        first.sum().backward()
    later.sum().backward()
    net(rows()).sum().backward()


def test_speeds_are_measured_once_and_only_where_they_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(below, "measure_machine", lambda device, folder, **_: (asked.append(folder), DISKS)[1])
    roomy = Chain(stages_of(), folder=tmp_path)
    roomy(rows()).sum().backward()
    Chain(stages_of(), folder=tmp_path, planner="revolve", slots=1)(rows())
    assert not asked
    assert roomy.plan is not None
    tight = Chain(stages_of(12), folder=tmp_path, budget=roomy.plan.peak_nbytes // 2)
    tight(rows()).sum().backward()
    tight(rows()[:50]).sum().backward()
    another = Chain(stages_of(12), folder=str(tmp_path), budget=roomy.plan.peak_nbytes // 2)
    another(rows()).sum().backward()
    assert asked == [str(tmp_path.resolve())]


def test_host_memory_is_a_tier_too(tmp_path: Path) -> None:
    knobs = {**KNOBS, "machine": HOSTS, "engine": "fake_streams"}
    net = Chain(stages := stages_of(), **knobs)
    assert_exact(net, stages)
    assert moved_by(net)[HOST, DEVICE] > 0
    with pytest.raises(BudgetError, match="HOST"):
        Chain(stages_of(), budget=Budget("1MiB", host="1KiB"), **knobs)(rows())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"home": "attic"}, "home='attic' was asked for; homes are"),
        ({"home": "disk"}, "without a folder; add folder="),
        ({"home": "host"}, "the device's memory is the host's"),
        ({"home": "device", "folder": "x"}, "leaves nothing for folder='x'"),
        (
            {"home": "device", "planner": "offload", "tail": 1},
            "moves states to a slower tier, and this chain has none",
        ),
        ({"engine": "cuda", "folder": "x", "planner": "offload", "machine": DISKS, "tail": 1}, "does not support"),
    ],
)
def test_homes_that_cannot_be_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=text):
        Chain(stages_of(), **options)(rows())


def test_a_given_plan_that_moves_needs_its_tiers(tmp_path: Path) -> None:
    net = Chain(stages_of(), folder=tmp_path, **KNOBS)
    net(rows())
    with pytest.raises(InputError, match="this chain has none; add folder="):
        Chain(stages_of(), plan=net.plan)(rows())
    assert_exact(again := Chain(stages_of(), plan=net.plan, folder=tmp_path), list(again.stages))


class Carrying(nn.Module):
    """A state of its own, and one that passes unchanged."""

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, skip = state
        return torch.sin(x), skip


def test_what_several_states_carry_is_on_the_device_once(tmp_path: Path) -> None:
    stages: list[Any] = [lambda x: (torch.sin(x), torch.exp(x)), *(Carrying() for _ in range(7)), lambda s: s[0] * s[1]]
    net = Chain(stages, folder=tmp_path, planner="offload", tail=1, ahead=3, machine=DISKS)
    x = torch.randn(300, 1000, requires_grad=True)
    (found,) = torch.autograd.grad(net(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(plain(stages)(x).square().sum(), x)
    assert torch.equal(found, wanted)
    assert net.plan is not None
    cotangent = torch.ones_like(x)
    gc.collect()
    with track_memory() as meter:
        root = torch.autograd.graph.get_gradient_edge(net(x))
        torch.autograd.backward([root], [cotangent])  # type: ignore[arg-type]
    assert meter.peak_nbytes <= 1.05 * net.plan.peak_nbytes
