"""Embeddings that stay off the device: plain PyTorch's bits, and bytes where they are said to be.

Plain PyTorch runs on the CPU here: the simulated GPU computes as that does, but has no sparse kernels."""

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from place import DEVICE
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of, is_streamed
from tapestream.ir.actions import Tier

ROWS, WIDTH, WORDS = 4096, 64, 7
GPU = DEVICE != "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Reader(nn.Module):
    """Four residual blocks over rows of two tables, one of them frozen."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=sparse)
        self.places = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(words.flip(-1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(**options: Any) -> Reader:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Reader(**options)


def batches(steps: int = 4) -> Iterator[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        yield torch.randint(0, ROWS, (3, WORDS), device="cpu")


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer, at_once: int = 2) -> dict[str, torch.Tensor]:
    """Losses, sparse gradients of every step (their places and values), then all parameters."""
    found: dict[str, torch.Tensor] = {}
    device = DEVICE if is_streamed(model) else "cpu"
    for step, words in enumerate(batch.to(device) for batch in batches()):
        for half in words.split(at_once):  # gradients of several backwards are added
            loss = model(half).square().mean()
            loss.backward()
            found[f"loss {len(found)}"] = loss.detach().cpu()
        gradient = model.get_parameter("words.weight").grad
        if gradient is not None and gradient.is_sparse:
            whole = gradient.detach().cpu().coalesce()
            found |= {f"places {step}": whole.indices(), f"values {step}": whole.values()}
        for one in optimizers:
            with contextlib.nullcontext() if is_streamed(model) else torch.device("cpu"):
                one.step()
            one.zero_grad()
    return found | {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def streamed(model: nn.Module, folder: Path, **options: Any) -> nn.Module:
    options = {"budget": "4MiB", "tables": ["words", "places"], **options}
    return ts.stream(model, device=DEVICE, folder=folder, **options)


@pytest.mark.parametrize(("name", "update"), [("SGD", "step"), ("Adagrad", "step"), ("SGD", "backward")])
def test_one_optimizer_for_all_is_exact(name: str, update: str, tmp_path: Path) -> None:
    cls, at_once = getattr(torch.optim, name), 2 if update == "step" else 3
    plain, model = made(), streamed(made(), tmp_path)
    expected = trained(plain, cls(plain.parameters(), lr=0.1), at_once=at_once)
    assert_same(expected, trained(model, ts.optimizer(model, cls, lr=0.1, update=update), at_once=at_once))
    ts.unstream(model)


def test_sparse_adam_beside_another_is_exact(tmp_path: Path) -> None:
    plain, model = made(), streamed(made(), tmp_path)
    found = []
    for one in (plain, model):
        table = one.get_parameter("words.weight")
        others = [p for p in one.parameters() if p is not table and p.requires_grad]
        beside = torch.optim.SparseAdam([table], lr=0.1)
        own = (
            torch.optim.AdamW(others, lr=0.1)
            if one is plain
            else ts.optimizer(one, torch.optim.AdamW, groups=[{"params": others}], lr=0.1)
        )
        found.append(trained(one, own, beside))
    assert_same(*found)
    ts.unstream(model)


def test_tables_take_nothing_of_the_device(tmp_path: Path) -> None:
    model = streamed(made(), tmp_path)
    handle, tables = handle_of(model), 2 * ROWS * WIDTH * 4
    place = Tier.HOST if GPU else Tier.DISK
    assert handle.homes.tables.nbytes(place) == tables
    assert handle.pool.held_nbytes(place) >= tables
    assert all(p.device.type == "cpu" for p in handle.homes.tables.parameters)
    model(next(batches()).to(DEVICE)).square().mean().backward()
    assert handle.last is not None
    assert handle.last.profiles[0].outside_nbytes < tables // 4
    ts.unstream(model)
    assert all(p.device.type == "cpu" for p in (model.words.weight, model.places.weight)) or GPU


def test_a_frozen_table_may_be_all_there_is(tmp_path: Path) -> None:
    """Of a language model with adapters, say; forward-only calls, saves and what is loaded are plain PyTorch's."""
    plain, model = made(sparse=False), made(sparse=False)
    for one in (plain, model):
        one.words.requires_grad_(False)
    streamed(model, tmp_path / "home")
    words = next(batches())
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(plain(words), model(words.to(DEVICE)).cpu())
    own = ts.optimizer(model, torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    assert_same(trained(plain, theirs), trained(model, own))
    ts.save(tmp_path / "saved", model=model, optimizer=own)
    assert_same(state_of(plain), state_of(model))
    other = streamed(made(sparse=False).requires_grad_(False), tmp_path / "other", tables=["places"])
    for parameter in other.layers.parameters():
        parameter.requires_grad_(True)
    ts.load(tmp_path / "saved", model=other)
    assert_same(state_of(model), state_of(other))
    ts.unstream(model)
    ts.unstream(other)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (["words"], "dense gradients"),
        (["layers.0"], "only the rows of an nn.Embedding"),
        (["nothing"], "tables= names 'nothing'"),
        (["inner"], "inside a block"),
        (["tied"], "tied weights"),
        (7, "tables= names 7"),
        ([nn.Embedding(4, 4)], "not part of the model"),
    ],
)
def test_what_cannot_be_looked_up_is_refused_by_name(tables: Any, said: str, tmp_path: Path) -> None:
    model = made(sparse=False)
    model.layers[0].inner = nn.Embedding(8, 8).requires_grad_(False)
    model.tied, model.out = nn.Embedding(16, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 16, bias=False)
    model.out.weight = model.tied.weight
    names = {"inner": model.layers[0].inner}
    asked = tables if isinstance(tables, int) else [names.get(one, one) for one in tables]
    with pytest.raises(ts.InputError, match=said):
        streamed(model, tmp_path, tables=asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(GPU, reason="RAM is below a GPU")
def test_without_a_disk_below_ram_there_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(ts.InputError, match="give folder="):
        ts.stream(made(), device=DEVICE, budget="1MiB", tables=["words"])


@pytest.mark.skipif(not GPU, reason="on the CPU all of it can be read where it is")
def test_a_table_whose_weight_is_wanted_on_the_device_is_named(tmp_path: Path) -> None:
    class Direct(Reader):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return super().forward(words).sum() + (torch.ones(1, ROWS, device=DEVICE) @ self.places.weight).sum()

    torch.manual_seed(0)
    model = streamed(Direct(), tmp_path)
    with pytest.raises(ts.InputError, match="used outside of its calls"):
        model(next(batches()).to(DEVICE))


@pytest.mark.skipif(not GPU, reason="on the CPU tables are on the disk")
def test_tables_count_against_ram(tmp_path: Path) -> None:
    table, model = ROWS * WIDTH * 4, made()
    small = ts.Budget("1MiB", host=table // 2)
    with pytest.raises(ts.BudgetError, match="HOST"):
        ts.stream(model, device=DEVICE, budget=small, tables=["words"])
    streamed(model, tmp_path, budget=ts.Budget("1MiB", host=5 * table // 2))
    handle = handle_of(model)
    assert handle.homes.tables.nbytes(Tier.HOST) == handle.homes.tables.nbytes(Tier.DISK) == table
    model(next(batches()).to(DEVICE)).square().mean().backward()
    assert handle.last is not None
    assert handle.last.plan.budget.host_nbytes == 3 * table // 2
    ts.unstream(model)


@pytest.mark.parametrize("use", ["norm", "product", "later"])
def test_a_weight_that_other_code_reads_is_refused_in_any_call(use: str, tmp_path: Path) -> None:
    class Read(Reader):
        calls = 0

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            assert self.words.weight.dtype == torch.float32
            found = super().forward(words).sum()
            if use == "norm":
                return found + self.words.weight.norm().to(found.device)
            if use == "product":
                return found + (torch.ones(1, WIDTH, device=DEVICE) @ self.words.weight.T).sum()
            return found if self.calls < 5 else found + torch.ones(1, ROWS, device=DEVICE).mm(self.words.weight).sum()

    with torch.device("cpu"):
        model = streamed(Read(), tmp_path)
    words = next(batches()).to(DEVICE)
    with pytest.raises(ts.InputError, match="an Embedding that tables= names is used outside of its calls"):
        trained_often(model, words)
    ts.unstream(model)


def trained_often(model: nn.Module, words: torch.Tensor) -> None:
    for _ in range(8):
        model(words).backward()


def test_lookups_of_one_call_add_up_and_state_counts_where_ram_is_the_device(tmp_path: Path) -> None:
    class Twice(Reader):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return super().forward(words) + super().forward(words.flip(0))

    def outside(model: nn.Module, **optimizer: Any) -> int:
        streamed(model, tmp_path)
        if optimizer:
            ts.optimizer(model, torch.optim.Adagrad, **optimizer)
        model(next(batches()).to(DEVICE)).square().mean().backward()
        found = handle_of(model).last
        ts.unstream(model)
        return found.profiles[0].outside_nbytes if not GPU else -(found.plan.budget.host_nbytes or 0)

    torch.manual_seed(0)
    with torch.device("cpu"):
        once, twice = outside(Reader()), outside(Twice())
        kept = outside(Reader(), lr=0.1)
    if not GPU:
        made = 3 * WORDS * (WIDTH * 4 + 8)
        assert twice - once >= made
        assert kept - once >= ROWS * WIDTH * 4


def test_an_optimizer_that_takes_no_sparse_gradients_is_refused_at_once(tmp_path: Path) -> None:
    model = streamed(made(), tmp_path)
    with pytest.raises(ts.InputError, match=r"words makes sparse gradients, which AdamW .* does not take"):
        ts.optimizer(model, torch.optim.AdamW, lr=0.1)
    with pytest.raises(ts.InputError, match="SparseAdam"):
        ts.optimizer(model, torch.optim.SGD, lr=0.1, weight_decay=0.1)
    ts.optimizer(model, torch.optim.SGD, lr=0.1)
    ts.unstream(model)


def test_a_table_belongs_to_one_streamed_model(tmp_path: Path) -> None:
    first, second = made(), made()
    second.words = first.words
    streamed(first, tmp_path / "one")
    with pytest.raises(ts.InputError, match="another streamed model"):
        streamed(second, tmp_path / "other")
    ts.unstream(first)
    streamed(second, tmp_path / "other")
    ts.unstream(second)


def test_a_table_that_is_thawed_is_named_before_anything_runs(tmp_path: Path) -> None:
    model = streamed(made(), tmp_path, tables=["places"] if not GPU else ["words", "places"], budget="8MiB")
    words = next(batches()).to(DEVICE)
    model(words).square().mean().backward()
    model.places.requires_grad_(True)
    with pytest.raises(ts.InputError, match="frozen, and is trained now"):
        model(words)
    with torch.no_grad():
        model(words)
    model.places.requires_grad_(False)
    model(words).square().mean().backward()
    ts.unstream(model)


@pytest.mark.skipif(GPU, reason="sparse gradients lie in RAM, which is not the device")
def test_sparse_gradients_count_where_ram_is_the_device(tmp_path: Path) -> None:
    outside = []
    for trained in (True, False):
        model = streamed(made(), tmp_path)
        model.words.requires_grad_(trained)
        model(next(batches())).square().mean().backward()
        outside.append(handle_of(model).last.profiles[0].outside_nbytes)
        ts.unstream(model)
    assert outside[0] - outside[1] >= 3 * WORDS * WIDTH * 4


def test_what_a_refusal_says_of_a_table_works_when_followed(tmp_path: Path) -> None:
    model, words = made(), next(batches()).to(DEVICE)
    streamed(model, tmp_path, budget="1MiB", tables=None)
    with pytest.raises(ts.BudgetError, match="keeps them off the device") as caught:
        model(words)
    said = re.search(r"tables=(\[.*?\])", str(caught.value))
    assert said is not None
    ts.unstream(model)
    streamed(model, tmp_path, budget="1MiB", tables=ast.literal_eval(said[1]))
    model(words).square().mean().backward()
    ts.unstream(model)
