"""Trainings of a small model in several processes, and in one plain process that runs the same micro-batches."""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from several import in_ranks
from torch import nn

import tapestream as ts

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
    among: int = 1,
) -> list[Any]:  # fmt: skip
    """Plain PyTorch: every micro-batch in turn, each gradient times 1/ranks before it is added. ``among``: gradients of
    blocks are first added up over so many micro-batches."""
    torch.set_num_threads(1)
    model = made(dtype=dtype)
    frozen(model)
    found, norms = OPTIMIZERS[optimizer](plainly, model), []
    inside = {id(p) for p in model.blocks.parameters()}
    for step in range(STEPS):
        found.zero_grad()
        run: dict[torch.Tensor, torch.Tensor] = {}
        for micro in range(micros):
            prepare(model, step, micro)
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(model(batch(step, micro, dtype)), parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient * (1 / ranks) if way == "mean" and ranks > 1 else gradient
                    if id(p) in inside:
                        run[p] = run[p] + gradient if p in run else gradient.clone()
                    else:
                        p.grad = gradient.clone() if p.grad is None else p.grad.add_(gradient)
            for p in list(run) if (micro + 1) % among == 0 else ():
                p.grad = run.pop(p) if p.grad is None else p.grad.add_(run.pop(p))
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        found.step()
    return [*digest(model), *norms]


@contextlib.contextmanager
def streamed(rank: int, budget: int | str, home: str, dtype: torch.dtype = torch.float32, **more: Any) -> Iterator[Any]:
    model = made(1 + rank, dtype=dtype)  # the first rank's weights are all ranks'
    more.pop("frozen", lambda one: None)(model)
    # After an error the model is still streamed, and may be writing.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        where = {"folder": folder} if home == "disk" else {}
        peers = more.pop("peers", ts.Peers())
        model = ts.stream(model, budget=budget, device="cpu", home=home, peers=peers, **where, **more)
        yield model
        ts.unstream(model)  # where all ranks have come here


def trained(
    rank: int, size: int, budget: int | str, home: str, micros: int, optimizer: str, update: str = "step",
    *, prepare: Any = prepare_nothing, clip: bool = False, dtype: torch.dtype = torch.float32,
    master: str | None = None, updating: dict[str, Any] | None = None, **more: Any,
) -> list[Any]:  # fmt: skip
    norms = []
    with streamed(rank, budget, home, dtype, **more) as model:
        found = OPTIMIZERS[optimizer](ts.optimizer, model, update=update, master=master, **(updating or {}))
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


def half_frozen(model: Any) -> None:
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    model.blocks[4].up.requires_grad_(False)


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
