"""`ts.stream(..., peers=)`: the bits of one plain process that runs the same micro-batches in the order of ranks."""

import contextlib
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from several import in_ranks
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.frontends.module.stream import handle_of

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
]
STEPS = 3
TIGHT = "200KiB"  # of 430 that all of it takes, at the least


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Parameters in blocks and outside of them. ``left_out``: numbers of blocks that a call does not run."""

    def __init__(self, width: int = 24, blocks: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)
        self.blocks = nn.ModuleList(Block(width).to(dtype) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.left_out: set[int] = set()
        self.scales = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
        return self.last(x * self.scale if self.scales else x).float().square().mean()


def one_length(step: int, micro: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(8, 8, generator=drawn).to(dtype)


def batch(step: int, micro: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of another length on each rank."""
    return torch.cat([one_length(step, micro, dtype)] * (1 + micro % 3))


def made(seed: int = 1, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def digest(model: nn.Module) -> list[str]:
    found = (p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return [hashlib.sha1(one).hexdigest()[:10] for one in found]


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda make, target, **more: make(target, torch.optim.AdamW, lr=0.01, **more),
    "sgd": lambda make, target, **more: make(target, torch.optim.SGD, lr=0.05, momentum=0.9, **more),
}


def plainly(target: nn.Module, cls: Any, *, update: str = "step", **options: Any) -> Any:
    return cls(target.parameters(), **options)


def prepare_nothing(model: Any, step: int, micro: int) -> None:
    """Every call runs all of the model."""


def leave_out(model: Any, step: int, micro: int) -> None:
    """Other blocks in each micro-batch, sometimes those that no one else leaves out; and a parameter that few use."""
    model.left_out = {(step + micro) % 5, (step + 3 * micro) % 5} if micro else {2}
    model.scales = micro % 2 == 0


def one_process(
    ranks: int, micros: int, optimizer: str, *, prepare: Any = prepare_nothing, clip: bool = False,
    dtype: torch.dtype = torch.float32, frozen: Callable[[Any], None] = lambda model: None, way: str = "mean",
) -> list[Any]:  # fmt: skip
    """Plain PyTorch: every micro-batch in turn, each gradient times 1/ranks before it is added."""
    torch.set_num_threads(1)
    model = made(dtype=dtype)
    frozen(model)
    found, norms = OPTIMIZERS[optimizer](plainly, model), []
    for step in range(STEPS):
        found.zero_grad()
        for micro in range(micros):
            prepare(model, step, micro)
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(model(batch(step, micro, dtype)), parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient * (1 / ranks) if way == "mean" and ranks > 1 else gradient
                    p.grad = gradient.clone() if p.grad is None else p.grad.add_(gradient)
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        found.step()
    return [*digest(model), *norms]


@contextlib.contextmanager
def streamed(rank: int, budget: int | str, home: str, dtype: torch.dtype = torch.float32, **more: Any) -> Iterator[Any]:
    model = made(1 + rank, dtype=dtype)  # the first rank's weights are all ranks'
    more.pop("frozen", lambda one: None)(model)
    with tempfile.TemporaryDirectory() as folder:
        where = {"folder": folder} if home == "disk" else {}
        peers = more.pop("peers", ts.Peers())
        model = ts.stream(model, budget=budget, device="cpu", home=home, peers=peers, **where, **more)
        try:
            yield model
        finally:
            ts.unstream(model)


def trained(
    rank: int, size: int, budget: int | str, home: str, micros: int, optimizer: str, update: str = "step",
    *, prepare: Any = prepare_nothing, clip: bool = False, dtype: torch.dtype = torch.float32, **more: Any,
) -> list[Any]:  # fmt: skip
    norms = []
    with streamed(rank, budget, home, dtype, **more) as model:
        found = OPTIMIZERS[optimizer](
            ts.optimizer, model, update=update, **({} if dtype == torch.float32 else {"master": None})
        )
        for step in range(STEPS):
            found.zero_grad()
            for turn in range(micros // size):
                micro = turn * size + rank
                prepare(model, step, micro)
                model(batch(step, micro, dtype)).backward()
            if clip:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            found.step()
        ts.unstream(model)
        done = [*digest(model), *norms]
        ts.stream(model, budget="1MiB", device="cpu")  # so that there is something to undo
    return done


def variants(rank: int, size: int, which: list[tuple[Any, ...]]) -> list[Any]:
    return [trained(rank, size, *a, **kw) for a, kw in which]


def same_in_all(size: int, which: list[tuple[Any, ...]], expected: list[list[Any]]) -> None:
    for found in in_ranks(size, variants, which, seconds=150):
        assert isinstance(found, list), found
        assert found == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_of_one_process(size: int) -> None:
    which, expected = [], []
    for budget, home, micros, optimizer, update in (
        (TIGHT, "disk", size, "adamw", "step"),
        (TIGHT, "disk", size, "adamw", "backward"),
        (TIGHT, "disk", 2 * size, "sgd", "step"),
        ("1GiB", "disk", size, "sgd", "backward"),
        ("1GiB", "device", 2 * size, "adamw", "step"),
        ("470KiB", "device", size, "sgd", "step"),
        ("1GiB", "device", size, "adamw", "backward"),
    ):
        which.append(((budget, home, micros, optimizer, update), {}))
        expected.append(one_process(size, micros, optimizer))
    same_in_all(size, which, expected)


def half_frozen(model: Any) -> None:
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    model.blocks[4].up.requires_grad_(False)


def test_clipping_frozen_parts_sixteen_bits_and_sums() -> None:
    bf16 = {"dtype": torch.bfloat16}
    which = [
        ((TIGHT, "disk", 4, "adamw"), {"clip": True}),
        (("1GiB", "device", 2, "sgd"), {"clip": True}),
        ((TIGHT, "disk", 4, "adamw"), {"frozen": half_frozen}),
        ((TIGHT, "disk", 2, "sgd"), bf16),
        ((TIGHT, "disk", 4, "sgd"), {"peers": ts.Peers(gradients="sum")}),
    ]
    expected = [
        one_process(2, 4, "adamw", clip=True), one_process(2, 2, "sgd", clip=True),
        one_process(2, 4, "adamw", frozen=half_frozen), one_process(2, 2, "sgd", **bf16),
        one_process(2, 4, "sgd", way="sum"),
    ]  # fmt: skip
    same_in_all(2, which, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_leave_out_different_blocks(size: int) -> None:
    which = [
        ((budget, home, micros, "sgd", update), {"prepare": leave_out})
        for budget, home, micros, update in (
            (TIGHT, "disk", size, "step"), (TIGHT, "disk", 2 * size, "step"), (TIGHT, "disk", size, "backward"),
            ("1GiB", "device", 2 * size, "step"),
        )
    ]  # fmt: skip
    same_in_all(size, which, [one_process(size, a[2], "sgd", prepare=leave_out) for a, _ in which])


class Sums(nn.Module):
    """Autograd gives one tensor to several operands: two parameters, a parameter and the block's input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.whole = nn.Parameter(torch.randn(8, width))
        self.empty, self.other = nn.Parameter(torch.ones(0)), nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.b_too = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.whole if len(x) == len(self.whole) else self.whole.sum(0)
        x = torch.tanh(x) + whole + self.other.float() + self.empty.sum()
        return x + (self.a + self.b if self.b_too else self.a) + 0.1 * self.a.sum()


def with_sums(model: Any) -> None:
    torch.manual_seed(7)
    model.blocks = nn.ModuleList(Sums(24) for _ in range(5))


def some_use_one(model: Any, step: int, micro: int) -> None:
    for block in model.blocks:
        block.b_too = micro % 2 == 0


def only_outside(model: Any) -> None:
    model.blocks.requires_grad_(False)


def only_the_last(model: Any) -> None:
    model.requires_grad_(False)
    model.last.requires_grad_(True)


def test_shared_gradients_and_what_lies_outside_alone() -> None:
    alike = {"frozen": with_sums, "prepare": some_use_one, "clip": True}
    which = [
        (("1MiB", "disk", 2, "sgd"), alike),
        (("1MiB", "device", 4, "adamw"), alike),
        ((TIGHT, "disk", 4, "sgd"), {"frozen": only_outside}),
        (("1MiB", "device", 2, "sgd", "backward"), {"frozen": only_outside}),
        ((TIGHT, "disk", 4, "adamw"), {"frozen": only_the_last}),
    ]
    expected = [
        one_process(2, 2, "sgd", **alike), one_process(2, 4, "adamw", **alike),
        one_process(2, 4, "sgd", frozen=only_outside), one_process(2, 2, "sgd", frozen=only_outside),
        one_process(2, 4, "adamw", frozen=only_the_last),
    ]  # fmt: skip
    same_in_all(2, which, expected)


def with_hooks(rank: int, size: int) -> Any:
    """Hooks after accumulation see the sum, of blocks and outside of them."""
    seen: dict[str, list[float]] = {}
    with streamed(rank, "1GiB", "disk") as model:
        for name, p in model.named_parameters():
            seen[name] = []
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(float(p.grad.abs().sum())))
        for _ in range(2):
            model(batch(0, rank)).backward()
        found = {name: float(p.grad.abs().sum()) for name, p in model.named_parameters() if p.grad is not None}
    return seen, found


def test_hooks_after_accumulation_see_the_sum() -> None:
    for seen, found in in_ranks(2, with_hooks):
        assert len(found) == 35
        for name, calls in seen.items():
            assert calls == ([] if name == "unused" else [pytest.approx(found[name] / 2), found[name]]), name


def failing(rank: int, size: int) -> Any:
    """A backward that fails on all ranks, and is caught: the next ones are as if it had not been."""
    with streamed(rank, "1GiB", "disk") as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        for step in range(STEPS):
            found.zero_grad()
            if step == 1:
                handle = model.blocks[2].up.weight.register_hook(lambda gradient: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    model(batch(step, rank)).backward()
                handle.remove()
                found.zero_grad()
            model(batch(step, rank)).backward()
            found.step()
        ts.unstream(model)
        done = digest(model)
        ts.stream(model, budget="1MiB", device="cpu")
    return done


def test_training_goes_on_after_a_backward_that_failed() -> None:
    assert in_ranks(2, failing) == [one_process(2, 2, "adamw")] * 2


def test_the_same_on_any_number_of_ranks() -> None:
    """With gradients summed, not averaged, by ranks that run four micro-batches a step together."""
    which = [((TIGHT, "disk", 4, "adamw"), {"peers": ts.Peers(gradients="sum")})]
    alone = in_ranks(1, variants, which)[0]
    for size in (2, 4):
        assert in_ranks(size, variants, which) == [alone] * size


def beside_averaging(rank: int, size: int) -> Any:
    model = made()
    averaged = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    found = OPTIMIZERS["adamw"](plainly, model)
    for step in range(STEPS):
        found.zero_grad()
        averaged(batch(step, rank)).backward()
        found.step()
    return digest(model) == trained(rank, size, "1GiB", "disk", size, "adamw")


def test_two_ranks_have_the_bits_of_distributed_data_parallel() -> None:
    assert in_ranks(2, beside_averaging) == [True, True]


def evaluating(rank: int, size: int, folder: str) -> Any:
    """A rank evaluates by itself, the first one saves; another run goes on from there."""
    losses = []
    for part in range(2):
        with streamed(rank, "1GiB", "disk") as model:
            found = OPTIMIZERS["adamw"](ts.optimizer, model)
            if part:
                ts.load(folder, model=model, optimizer=found)
            for step in range(2 * part, 2 * part + 2):
                found.zero_grad()
                model(batch(step, rank)).backward()
                found.step()
                if rank == 0:
                    with torch.no_grad():
                        losses.append(float(model(batch(9, 9))))
            if rank == 0 and not part:
                ts.save(folder, model=model, optimizer=found)
            torch.distributed.barrier()
            weights = [p.detach().clone() for p in model.parameters()]
    return losses, digest(nn.ParameterList(weights))


def test_one_rank_evaluates_and_saves_and_all_go_on_from_there(tmp_path: Path) -> None:
    (losses, first), (none, second) = in_ranks(2, evaluating, str(tmp_path))
    assert (len(losses), none) == (4, [])
    assert first == second


def measured(rank: int, size: int, update: str) -> list[int]:
    """Most bytes of each step's forward and backward, with what lies outside of the blocks."""
    peaks = []
    with streamed(rank, TIGHT, "disk") as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model, update=update)
        for step in range(4):
            found.zero_grad()
            if step:  # nothing can be measured while the first call is
                leave_out(model, step, rank)
            watching = ts.track_memory() if step else contextlib.nullcontext()
            with watching as watch:
                model(batch(step, rank)).backward()
            found.step()
            if watch is not None:
                peaks.append(watch.peak_nbytes + outside_nbytes(handle_of(model)))
    return peaks


@pytest.mark.parametrize("update", ["step", "backward"])
def test_sums_are_in_the_budget(update: str) -> None:
    for peaks in in_ranks(2, measured, update):
        assert max(peaks) <= ts.Budget(TIGHT).device_nbytes, peaks


def in_group_of_one(rank: int, size: int) -> Any:
    return trained(rank, size, "1GiB", "disk", 2, "adamw")


def test_a_group_of_one_trains_as_one_process() -> None:
    assert in_ranks(1, in_group_of_one) == [one_process(1, 2, "adamw")]


# -- ranks that do not do the same ------------------------------------------------------------------------------------


class SparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_sparse()


def differently(rank: int, size: int, how: str) -> Any:
    with streamed(rank, "1GiB", "disk") as model:
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        for step in range(2):
            if how != "zero_grad" or rank == 0:
                found.zero_grad()
            if how == "calls" and rank == 1 and step == 1:
                return "ended"
            if how == "order" and rank == 1:
                model.blocks._modules = dict(reversed(model.blocks._modules.items()))
            if how == "outside" and rank == 1:
                model.scale.square().sum().backward()
            loss = model(batch(step, rank))
            if how == "sparse":
                loss = loss + (SparseGradient.apply(model.unused) if rank == 1 else model.unused).sum()
            if how == "two":
                loss = loss + model(batch(step, rank))
            loss.backward()
            if how == "step" and rank == 1:
                found.zero_grad()
                model(batch(step, rank)).backward()
            found.step()
    return "trained"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("zero_grad", "InputError: when this backward began, ranks had gradients of different parameters"),
        ("order", "InputError: ranks run the blocks of a streamed model in different orders"),
        ("outside", "InputError: when this backward began, ranks had gradients of different parameters"),
        ("sparse", "InputError: a sparse gradient was to be summed over ranks"),
        ("two", "InputError: 2 calls of a streamed model with peers= await their backward"),
        ("step", "InputError: ranks do different things: rank 0 began step() (number"),
    ],
)
def test_what_differs_is_one_line_on_every_rank(how: str, said: str) -> None:
    for found in in_ranks(2, differently, how, timeout=20):
        assert found.startswith(said), found


def test_ranks_that_make_fewer_calls_end_the_others_within_the_timeout() -> None:
    found = in_ranks(2, differently, "calls", timeout=4)
    assert all(one.startswith(("StorageError: rank", "ended")) for one in found), found
    assert any("not every rank came" in one for one in found)


def dying(rank: int, size: int) -> Any:
    with streamed(rank, "1GiB", "disk") as model:
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        for step in range(2):
            found.zero_grad()
            loss = model(batch(step, rank))
            if rank == 1 and step:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            found.step()
    return "trained"


def test_a_rank_that_dies_ends_the_others() -> None:
    first, second, third = in_ranks(3, dying, timeout=20)
    assert second == "nothing: it ended"
    for one in (first, third):
        assert "not every rank came" in one


def around(rank: int, size: int, directly: bool) -> Any:
    with streamed(rank, "1GiB", "disk") as model:
        averaged = nn.parallel.DistributedDataParallel(model if directly else nn.Sequential(model))
        averaged(batch(0, rank)).backward()
    return "taken"


@pytest.mark.parametrize("directly", [True, False])
def test_distributed_data_parallel_around_it_is_refused(directly: bool) -> None:
    said = (
        "InputError: DistributedDataParallel was asked" if directly else "InputError: a streamed Net with peers= was ca"
    )
    for found in in_ranks(2, around, directly):
        assert found.startswith(said), found
        assert "leave it out" in found


def other_models(rank: int, size: int, how: str) -> Any:
    model = made()
    if rank and how == "shape":
        model.blocks[3] = Block(32)
    if rank and how == "dtype":
        model.last.double()
    if rank and how == "more":
        model.register_buffer("more", torch.ones(1))
    if rank and how == "frozen":
        model.blocks[1].requires_grad_(False)
    way = "sum" if rank and how == "way" else "mean"
    blocks = ["blocks.0", "blocks.1"] if rank and how == "blocks" else None
    model = ts.stream(model, budget="1GiB", device="cpu", blocks=blocks, peers=ts.Peers(gradients=way))
    lr = 0.1 if rank and how == "lr" else 0.2
    found = ts.optimizer(model, torch.optim.SGD, lr=lr)
    model(batch(0, rank)).backward()
    found.step()
    return "trained"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "shape",
            "rank 0 blocks.3.norm.weight: torch.float32 [24] requires_grad=True, rank 1 blocks.3.norm.weight: torch.fl",
        ),
        ("dtype", "rank 0 last.weight: torch.float32 [1, 24] requires_grad=True, rank 1 last.weight: torch.float64"),
        ("more", "rank 0 nothing, rank 1 more: torch.float32 [1]"),
        ("frozen", "rank 0 blocks.1.norm.weight: torch.float32 [24] requires_grad=True, rank 1 blocks.1.norm.weight"),
        ("way", "rank 0 gradients='mean', rank 1 gradients='sum'"),
        ("blocks", "rank 0 block 2 is blocks.2"),
        ("lr", "InputError: the options of optimizers differ between ranks: rank 0 SGD, update='step', [{'lr': 0.2"),
    ],
)
def test_models_that_differ_are_named_before_anything_is_sent(how: str, said: str) -> None:
    found = in_ranks(2, other_models, how)
    assert found[0] == found[1]
    assert said in found[0]


def test_inputs_that_are_none() -> None:
    with pytest.raises(InputError, match=r"gradients='max'.*'mean' or 'sum'"):
        ts.Peers(gradients="max")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no process group; start each with torchrun"):
        ts.stream(made(), budget="1MiB", device="cpu", peers=ts.Peers())
    for given in ("mean", True, ts.Peers):
        with pytest.raises(InputError, match=r"it is ts.Peers\(\), or None"):
            ts.stream(made(), budget="1MiB", device="cpu", peers=given)  # type: ignore[arg-type]
