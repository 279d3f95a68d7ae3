"""What a plan moves below the device and back: restart checkpoints and saved tensors, the same bits as without."""

import copy
import gc
import random
from collections.abc import Callable
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import numpy
import pytest
import test_program_random
import torch
from side_by_side import compare, fix_seconds, least, outcome, same
from thinned import one_in
from tiered import DEVICE, DISK, DISKS, HOST, HOSTS
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import GradientError, InputError, StorageError
from tapestream.executor.program.replay.moves import Moves
from tapestream.frontends.program.sizes import Sizes

WIDTH, BLOCKS = 48, 8
PLANNERS = ("offload", "superneurons", "joint", "auto")


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on measured seconds."""
    monkeypatch.setattr(Sizes, "seconds", lambda sizes: numpy.full(len(sizes.record), 1e-3))


def options(engine: str, folder: Path) -> dict[str, Any]:
    if engine == "fake_streams":
        return {"engine": engine, "machine": HOSTS}
    return {"engine": engine, "machine": DISKS, "folder": folder}


class Block(nn.Module):
    """Views, a write in place, a dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.up(self.norm(x)))
        y[:, 0] = y[:, 1] * 0.5
        left, right = F.gelu(y).chunk(2, 1)
        return x + F.dropout(self.down(torch.cat([right, left.flip(0)], 1)), 0.1, self.training)


class Residual(nn.Module):
    """Nothing random, nothing written into."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


def network() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(64, WIDTH).requires_grad_()


def peak_budget(net: nn.Module, x: Tensor, part: float) -> int:
    """That part of what a program takes that keeps all."""
    probe = copy.deepcopy(net)
    run = ts.Program(probe, budget="1GiB", planner="store_all")
    for _ in range(2):
        run(x * 1.0).sum().backward()
    assert run.plan is not None
    return int(part * run.plan.peak_nbytes)


PARTS = [(planner, part) for planner in PLANNERS for part in (0.3, 0.4 if planner == "superneurons" else 0.5)]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("planner", "part", "engine"),
    one_in(2, [(*one, engine) for one in PARTS for engine in ("threads", "adversarial", "fake_streams")]),
)
def test_equal_bits_and_bytes_as_planned(engine: str, planner: str, part: float, tmp_path: Path) -> None:
    net, x = network()
    budget = peak_budget(net, x, part)
    leaves = [x, *net.parameters()]
    run = compare(
        net, leaves, lambda: (x * 1.0,), budget, calls=4, planner=planner, modules=[net], **options(engine, tmp_path)
    )
    plan, before = run.plan, dict(run.copies.bytes_moved)
    assert plan is not None
    assert plan.simulation.bytes_moved, "nothing moves"
    run(x * 1.0).sum().backward()
    assert run.report is not None
    assert run.report.planned
    moved = {lane: n - before[lane] for lane, n in run.copies.bytes_moved.items()}
    lower = HOST if engine == "fake_streams" else DISK
    # States of generators stay, and so do copies of buffers. What several values share may be there still when the
    # second of them is fetched.
    assert 0 < moved[DEVICE, lower] <= plan.simulation.bytes_moved[DEVICE, lower]
    assert 0 < moved[lower, DEVICE] <= plan.simulation.bytes_moved[lower, DEVICE]


@pytest.mark.parametrize("planner", ["offload", "superneurons", "joint"])
def test_what_is_planned_moves(planner: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Residual() for _ in range(BLOCKS))), torch.randn(64, WIDTH).requires_grad_()
    run = ts.Program(net, budget=peak_budget(net, x, 0.25), planner=planner, **options("threads", tmp_path))
    for _ in range(4):
        plan, before = run.plan, run.copies.bytes_moved.get((DEVICE, DISK), 0)
        run(x * 1.0).sum().backward()
    assert plan is not None
    moved = run.copies.bytes_moved[DEVICE, DISK] - before
    assert moved == plan.simulation.bytes_moved[DEVICE, DISK] > 0


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_peak_stays_within_the_budget(planner: str, tmp_path: Path) -> None:
    net, x = network()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    budget = peak_budget(net, x, 0.4)
    run = ts.Program(net, budget=budget, planner=planner, **options("threads", tmp_path))
    for _ in range(5):
        with ts.track_memory("cpu") as meter:
            run(x).sum().backward()
        outside = x.nbytes + 2 * 64 * WIDTH * 4 + 2 * 2 * WIDTH * WIDTH * 4  # its gradient, results, one of a weight
        assert meter.peak_nbytes <= 1.05 * budget + outside
    assert run.plan is not None
    assert run.plan.simulation.bytes_moved


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strange", [[0, 1, 2, 3, 4, 4, 4, 4, 5], [0, 1, 2], [*range(BLOCKS), 3], [7, 6], []])
def test_a_call_that_turns_out_otherwise_goes_on_without_the_plan(strange: list[int], tmp_path: Path) -> None:
    net, x = network()

    def function(x: Tensor, blocks: list[int]) -> Tensor:
        for number in blocks:
            x = net.blocks[number](x)
        return x * 2.0

    leaves, usual = [x, *net.parameters()], list(range(BLOCKS))
    options_ = options("adversarial", tmp_path)
    run = ts.Program(function, budget=peak_budget(net, x, 0.5), planner="offload", **options_)
    net.eval()
    for blocks in (usual, usual, usual, strange, usual, strange, usual):
        wanted = outcome(function, leaves, lambda blocks=blocks: (x * 1.0, list(blocks)), 3)
        found = outcome(run, leaves, lambda blocks=blocks: (x * 1.0, list(blocks)), 3)
        assert all(map(same, found[2], wanted[2]))
        assert all(map(same, found[0], wanted[0]))
    gc.collect()
    assert not any(run._live.nbytes.values())


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 400), marks=pytest.mark.full)])
@pytest.mark.timeout(1800)
def test_random_programs(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, writes in place, draws: whatever moves comes back as it was."""
    moved = 0
    for seed in seeds:
        chosen = random.Random(seed)
        monkeypatch.setattr(test_program_random, "SIDE", chosen.choice([32, 64, 96]))
        operations = range(len(test_program_random.OPERATIONS))
        steps = chosen.choices([*operations, *(0, 1, 2, 11, 13, 15) * 5], k=chosen.randrange(9, 60))
        program, make, leaves = test_program_random.made_of(steps, seed)
        try:
            expected = outcome(program, leaves, make, seed)
        except (RuntimeError, ValueError):  # writes, or splits of views, that plain PyTorch refuses
            continue
        needed = least(program, leaves, make, seed)
        for planner in ("offload", "joint", "superneurons"):
            given = options(chosen.choice(["adversarial", "threads"]), tmp_path)
            run = ts.Program(program, budget=int(chosen.choice([1.05, 1.2, 1.5]) * needed), planner=planner, **given)
            for _ in range(3):
                found = outcome(run, leaves, make, seed)
                assert all(map(same, found[0], expected[0]))
                assert all(map(same, found[2], expected[2]))
                assert torch.equal(found[3], expected[3])
            moved += bool(run.plan is not None and run.plan.simulation.bytes_moved)
    assert moved > len(seeds) // 4  # of those that plain PyTorch does not refuse


def repeated(engine: str, folder: Path, between: Callable[[int, dict[int, Tensor]], None]) -> list[bool]:
    """A program of equal products whose saved tensors move; ``between`` gets, after each, the states so far that the
    program still holds. Whether each of four calls had the bits of plain PyTorch and its gradients."""
    torch.manual_seed(1)
    weight, x = (torch.randn(WIDTH, WIDTH) / 7).requires_grad_(), torch.randn(256, WIDTH).requires_grad_()

    def function(x: Tensor) -> Tensor:
        held: dict[int, Tensor] = {}
        for k in range(16):
            x = held[k] = torch.tanh(x @ weight)
            held.pop(k - 3, None)
            between(k, held)
        return x

    wanted = outcome(function, [weight, x], lambda: (x * 1.0,))
    run = ts.Program(function, budget=10 * x.nbytes, planner="offload", **options(engine, folder))
    found = [outcome(run, [weight, x], lambda: (x * 1.0,)) for _ in range(4)]
    assert run.copies.copies > 0, "nothing has moved"
    return [all(map(same, (*one[0], *one[2]), (*wanted[0], *wanted[2]))) for one in found]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("engine", ["threads", "adversarial", "fake_streams"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_an_operation_writes_into_on_its_way_waits(engine: str, after: int, tmp_path: Path) -> None:
    """A state is a restart checkpoint, or saved with its version unseen by backward, and written into soon after."""

    def between(k: int, held: dict[int, Tensor]) -> None:
        if k % 2 and k - after in held and after:
            with torch.no_grad():
                held[k - after].view(-1)[:7].add_(0.0)  # a new version, the same numbers

    def harmless(k: int, held: dict[int, Tensor]) -> None:
        if k % 2:
            (held[k] * 1.0).detach().mul_(0.0)

    assert all(repeated(engine, tmp_path, harmless))
    with pytest.raises(RuntimeError, match="modified by an inplace operation") if after else nothing():
        assert all(repeated(engine, tmp_path, between))


def test_what_something_else_writes_into_on_its_way_is_of_no_use(tmp_path: Path, monkeypatch: Any) -> None:
    """No torch call shows the write: its numbers are those that backward must not see."""
    net, x = network()
    net.eval()
    run = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="offload", **options("threads", tmp_path))
    leaves = [x, *net.parameters()]
    wanted = outcome(net, leaves, lambda: (x * 1.0,))
    for _ in range(3):
        outcome(run, leaves, lambda: (x * 1.0,))
    assert run.report is not None
    assert run.report.planned
    wait, spoilt = Moves._wait, list[Any]()

    def disturbed(moves: Moves, value: Any, tier: Any) -> None:
        tensor, version = moves._leaving[value][1][-1]
        spoilt.append(value)
        if len(spoilt) == 3:
            moves._leaving[value][1][-1] = tensor, version + 1
        wait(moves, value, tier)

    monkeypatch.setattr(Moves, "_wait", disturbed)
    found = outcome(run, leaves, lambda: (x * 1.0,))
    assert len(spoilt) == 3
    assert not run.report.planned
    assert all(map(same, found[2], wanted[2]))


def test_second_backwards_and_parts_of_one(tmp_path: Path) -> None:
    net, x = network()
    net.eval()
    run = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="joint", **options("adversarial", tmp_path))
    for _ in range(3):
        run(x * 1.0).sum().backward()
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(net(x * 1.0).sum(), parameters)
    loss = run(x * 1.0).sum()
    for _ in range(2):
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert all(map(torch.equal, found, wanted))
    half = run(x * 1.0).sum()
    last = parameters[-4:]
    assert all(map(torch.equal, torch.autograd.grad(half, last, retain_graph=True), wanted[-4:]))
    assert all(map(torch.equal, torch.autograd.grad(half, parameters), wanted))


def test_superneurons_goes_by_single_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of convolutions are kept or move, what is cheap between them runs again, and no convolution does."""
    fix_seconds(monkeypatch, {"conv2d": 1.0, "batch_norm": 0.01, "relu": 0.01})
    torch.manual_seed(0)
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Softplus()) for _ in range(12)]
    net, x = nn.Sequential(*(layer for four in layers for layer in four)), torch.randn(4, 8, 16, 16)
    function = lambda x: net(x).square().sum()  # noqa: E731
    for part, times in ((0.2, {2, 3, 4}), (0.3, {1})):
        run = compare(
            function, list(net.parameters()), lambda: (x * 1.0,), peak_budget(net, x, part), calls=3,
            planner="superneurons", modules=[net], **options("threads", tmp_path),
        )  # fmt: skip
        rows = run.explain(x * 1.0).rows
        assert run.plan is not None
        assert len(run.plan.profile) == len(net) + 12 + 2  # batches are counted; the square and the sum
        assert (
            {"moved"}
            < {row.fate for row in rows if row.operation == "conv2d"}
            <= {"moved", "restart checkpoint", "kept"}
        )
        again = [row for row in rows if row.fate == "recomputed"]
        assert {row.operation for row in again} == {"batch_norm", "relu", "softplus"}
        assert {row.times for row in again} == times


def test_a_plan_may_say_that_the_first_state_moves(tmp_path: Path) -> None:
    """It stays, for those who ask for gradients a second time; the plan goes on."""
    net, x = network()
    net.eval()
    run = ts.Program(net, budget=peak_budget(net, x, 0.25), planner="superneurons", **options("threads", tmp_path))
    leaves = [x, *net.parameters()]
    wanted = outcome(net, leaves, lambda: (x * 1.0,))
    for _ in range(3):
        assert all(map(same, outcome(run, leaves, lambda: (x * 1.0,))[2], wanted[2]))
    assert run.plan is not None
    first = ts.ir.Value(ts.ir.Kind.STATE, 0)
    moved = {action.value for action in run.plan.schedule if isinstance(action, ts.ir.Offload)}
    assert first in moved, "choose another budget"


def test_what_is_dropped_gives_its_bytes_back(tmp_path: Path) -> None:
    net, x = network()
    run = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="offload", **options("threads", tmp_path))
    for _ in range(3):
        run(x * 1.0).sum().backward()
    for _ in range(3):
        loss = run(x * 1.0).sum()
        assert run._live.nbytes[DISK] > 0
        del loss
        gc.collect()
        assert not any(run._live.nbytes.values())
    run(x[:8] * 1.0)  # any call
    assert run._below is not None
    pool, _ = run._below._open()
    assert pool.held_nbytes(DISK) == 0


def test_calls_share_what_the_disk_may_take(tmp_path: Path) -> None:
    """The second call has no room below: it goes on without its plan, or within the rest."""
    net, x = network()
    budget = peak_budget(net, x, 0.5)
    alone = ts.Program(net, budget=budget, planner="offload", **options("threads", tmp_path / "alone"))
    for _ in range(3):
        alone(x * 1.0).sum().backward()
    assert alone.plan is not None
    disk = int(1.5 * alone.plan.simulation.peak_nbytes[DISK])
    both = ts.Budget(3 * budget, disk=disk)
    run = ts.Program(net, budget=both, planner="offload", **options("threads", tmp_path / "both"))
    wanted = outcome(net, list(net.parameters()), lambda: (x * 1.0,))
    net.load_state_dict(net.state_dict())
    for _ in range(3):
        run(x * 1.0).sum().backward()
    torch.manual_seed(0)
    first = run(x * 1.0)
    torch.manual_seed(0)
    second = run(x * 1.0)
    assert run._live.nbytes[DISK] <= disk
    for result in (second, first):
        for parameter in net.parameters():
            parameter.grad = None
        (result * result).sum().backward()
        assert all(same(p.grad, g) for p, g in zip(net.parameters(), wanted[2], strict=True))


def test_an_exception_in_the_midst_leaves_nothing_behind(tmp_path: Path) -> None:
    net, x = network()
    net.eval()
    fails = [False]

    def function(x: Tensor) -> Tensor:
        for number, block in enumerate(net.blocks):
            if fails[0] and number == 6:
                raise KeyError("the user's own")
            x = block(x)
        return x

    run = ts.Program(function, budget=peak_budget(net, x, 0.5), planner="offload", **options("threads", tmp_path))
    wanted = outcome(function, [x], lambda: (x * 1.0,))
    for _ in range(3):
        outcome(run, [x], lambda: (x * 1.0,))
    fails[0] = True
    with pytest.raises(KeyError, match="own"):
        run(x * 1.0)
    fails[0] = False
    assert all(map(same, outcome(run, [x], lambda: (x * 1.0,))[2], wanted[2]))
    assert run._below is not None
    assert run._below._open()[0].held_nbytes(DISK) == 0


def test_opaque_modules_and_copies(tmp_path: Path) -> None:
    net, x = network()
    given = options("adversarial", tmp_path)
    budget = peak_budget(net, x, 0.5)
    run = compare(
        net, [x, *net.parameters()], lambda: (x * 1.0,), budget, calls=4, planner="offload", modules=[net],
        opaque=[Block], **given,
    )  # fmt: skip
    assert run.copies.copies > 0
    twin = copy.deepcopy(run)
    assert twin._tiers == run._tiers
    assert twin._below is None
    for _ in range(3):
        twin(x * 1.0).sum().backward()
    assert twin.copies.copies > 0


def test_explain_says_what_moves(tmp_path: Path) -> None:
    net, x = network()
    run = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="offload", **options("threads", tmp_path))
    found = run.explain(x)
    count, nbytes = found.sums()["moved"]
    assert count > 0
    assert "moved away and back" in str(found)
    stays = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="rotor").explain(x)
    assert "moved" not in stays.sums()
    assert max(found.live_nbytes) <= run.budget.device_nbytes  # type: ignore[operator]
    assert sum(found.stored_nbytes) - sum(found.live_nbytes) > nbytes
    found.plot(tmp_path / "live.png")


def test_refused_by_name(tmp_path: Path) -> None:
    net, x = network()
    with pytest.raises(InputError, match="home='host' was asked for on the CPU"):
        ts.Program(net, budget="1MiB", home="host", device="cpu")(x)
    with pytest.raises(InputError, match="home='disk' was asked for without a folder"):
        ts.Program(net, budget="1MiB", home="disk")
    with pytest.raises(InputError, match="'offload' moves states to a slower tier"):
        ts.Program(net, budget=peak_budget(net, x, 0.5), planner="offload")(x * 1.0)
    file = tmp_path / "file"
    file.write_text("")
    run = ts.Program(net, budget=peak_budget(net, x, 0.5), planner="offload", machine=DISKS, folder=file)
    run(x * 1.0).sum().backward()
    with pytest.raises((StorageError, InputError), match="file"):
        run(x * 1.0)
    small = ts.Budget(peak_budget(net, x, 0.5), disk="4KiB")
    run = ts.Program(net, budget=small, planner="offload", **options("threads", tmp_path / "small"))
    for _ in range(3):
        run(x * 1.0).sum().backward()  # as without a folder
    assert run.copies.copies == 0


def test_a_result_written_into_before_backward_is_refused_or_right(tmp_path: Path) -> None:
    """Plain PyTorch refuses; what was copied before is still what it was."""
    net, x = network()
    net.eval()
    leaves = list(net.parameters())
    for engine in ("threads", "adversarial"):
        given = options(engine, tmp_path / engine)
        run = ts.Program(net, budget=peak_budget(net, x, 0.4), planner="offload", **given)
        for _ in range(3):
            run(x * 1.0).sum().backward()
        result = run(x * 1.0)
        assert run.report is not None
        assert run.report.planned
        wanted = torch.autograd.grad(net(x * 1.0).sum(), leaves)
        total = result.sum()
        with torch.no_grad():
            result.zero_()
        try:
            found = torch.autograd.grad(total, leaves)
        except RuntimeError as error:  # GradientErrors are
            assert "modified" in str(error)  # noqa: PT017
        else:
            assert all(map(torch.equal, found, wanted))


def test_where_in_its_storage_a_tensor_begins_is_the_same_when_it_comes_back(tmp_path: Path) -> None:
    """A program may say so itself: `as_strided` with an offset counts from the beginning of the storage."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).div(7).requires_grad_()

    def function(x: Tensor) -> Tensor:
        for k in range(10):
            x = torch.tanh(x @ weight)
            x = x.as_strided((64, WIDTH), (2 * WIDTH, 1), k % 2 * WIDTH).repeat(2, 1) * 0.7 + x
        return x

    x = torch.randn(128, WIDTH).requires_grad_()
    for planner in ("offload", "superneurons"):
        given = options("threads", tmp_path / planner)
        run = compare(
            function, [weight, x], lambda: (x * 1.0,), 8 * x.nbytes, calls=4, planner=planner, **given
        )  # fmt: skip
        assert run.copies.copies > 0


class SquareInPlace(torch.autograd.Function):
    """Its backward writes into what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(gradient) * 2


@pytest.mark.parametrize("part", [0.3, 0.45, 0.7])
@pytest.mark.parametrize("planner", ["offload", "joint"])
def test_what_a_backward_writes_into_is_right_or_refused(planner: str, part: float, tmp_path: Path) -> None:
    """Plain PyTorch is right, as nobody else needs it; here restart checkpoints may show the same memory."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).div(7).requires_grad_()
    x = torch.randn(128, WIDTH).requires_grad_()

    def function(x: Tensor) -> Tensor:
        for _ in range(5):
            h = x + 0.1
            u = torch.tanh(h + 0.2)
            for _ in range(3):
                u = torch.tanh(u @ weight)
            x = 0.5 * u + 0.1 * SquareInPlace.apply(h)  # type: ignore[no-untyped-call]
        return x

    wanted = outcome(function, [weight, x], lambda: (x * 1.0,))
    stored = ts.Program(function, budget="1GiB", planner="store_all")
    outcome(stored, [weight, x], lambda: (x * 1.0,))
    assert stored.plan is not None
    budget = int(part * stored.plan.peak_nbytes)
    run = ts.Program(function, budget=budget, planner=planner, **options("threads", tmp_path))
    for _ in range(4):
        try:
            found = outcome(run, [weight, x], lambda: (x * 1.0,))
        except GradientError as error:
            assert "modified by an in-place operation" in str(error)  # noqa: PT017
        else:
            assert all(map(same, found[2], wanted[2]))


def test_a_number_behind_the_device_is_no_other_device(tmp_path: Path) -> None:
    net, x = network()
    budget = peak_budget(net, x, 0.5)
    run = ts.Program(net, budget=budget, planner="offload", device="cpu:0", **options("threads", tmp_path))
    for _ in range(3):
        run(x * 1.0).sum().backward()
    assert run.copies.copies > 0


@pytest.mark.parametrize("part", [0.45, 0.6, 0.8])
def test_what_the_user_writes_into_while_it_is_under_way_is_run_again_or_refused(part: float, tmp_path: Path) -> None:
    """The tensors were saved by operations that nobody differentiates, so plain PyTorch does not mind."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).div(7).requires_grad_() for _ in range(12)]
    x, wide = torch.randn(64, WIDTH).requires_grad_(), torch.randn(4 * WIDTH, WIDTH).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        others = []
        for weight in weights:
            y = F.gelu(F.layer_norm(x, (WIDTH,)) @ weight)
            others.append(torch.tanh(y).detach())
            x = x + y @ wide.t()[:, :WIDTH] + others[-1]
        return torch.tanh(x), *others

    def gradients(call: Any) -> tuple[Tensor, ...]:
        result, *others = call(x * 1.0)
        for other in others:
            other.add_(1.0)
        return torch.autograd.grad(result.sum(), [x, wide, *weights])

    wanted = gradients(function)
    stored = ts.Program(function, budget="1GiB", planner="store_all")
    for _ in range(2):
        gradients(stored)
    assert stored.plan is not None
    budget = int(part * stored.plan.peak_nbytes)
    run = ts.Program(function, budget=budget, planner="joint", **options("threads", tmp_path))
    for _ in range(4):
        try:
            found = gradients(run)
        except GradientError as error:  # where a restart checkpoint on the device shows one of them
            assert "modified by an in-place operation after it was kept" in str(error)  # noqa: PT017
        else:
            assert all(map(torch.equal, found, wanted))
    assert run.copies.copies > 0
