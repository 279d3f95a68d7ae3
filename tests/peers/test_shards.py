"""`ts.Peers(shard=True)`: the bits of one plain process, of blocks of which each rank keeps a part."""

import copy
import hashlib
import io
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from several import FOUR, TWO, in_ranks
from torch import nn
from trainings import (
    OPTIMIZERS,
    TIGHT,
    Block,
    Net,
    batch,
    digest,
    half_frozen,
    leave_out,
    made,
    one_length,
    one_process,
    only_outside,
    only_the_last,
    plainly,
    same_in_all,
    some_use_one,
    streamed,
    trained,
    variants,
    with_sums,
)

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.executor.shard_copies import ShardCopies
from tapestream.frontends.module.homes.weights import Weights
from tapestream.frontends.module.stream import handle_of
from tapestream.peers import divided
from tapestream.storage.tensor_files import read_tensors

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
]
D, S, H, K = ts.Tier.DEVICE, ts.Tier.SHARD, ts.Tier.HOST, ts.Tier.DISK
DIRECT = ts.Machine(links={(D, K): ts.Link(1e9), (K, D): ts.Link(1e9)})
TWO_HOPS = ts.Machine(links={(H, D): ts.Link(2e9), (D, H): ts.Link(2e9), (K, H): ts.Link(1e9), (H, K): ts.Link(1e9)})
SHARD = {"peers": ts.Peers(shard=True)}
SUMS = {"peers": ts.Peers(gradients="sum", shard=True)}


@pytest.mark.parametrize("size", [TWO, 3, FOUR])
def test_the_bits_of_one_process(size: int) -> None:
    which, expected = [], []
    for budget, home, micros, optimizer, update in (
        (TIGHT, "disk", size, "adamw", "step"),
        (TIGHT, "disk", size, "adamw", "backward"),
        (TIGHT, "disk", 2 * size, "sgd", "step"),
        ("1GiB", "disk", size, "sgd", "backward"),
        ("1GiB", "disk", 2 * size, "adamw", "step"),
        ("400KiB", "device", 2 * size, "adamw", "step"),
        ("1GiB", "device", size, "sgd", "backward"),
    ):
        which.append(((budget, home, micros, optimizer, update), SHARD))
        expected.append(one_process(size, micros, optimizer))
    same_in_all(size, which, expected)


def test_clipping_frozen_parts_sixteen_bits_and_sums() -> None:
    bf16 = {"dtype": torch.bfloat16}
    which = [
        ((TIGHT, "disk", 4, "adamw"), {"clip": True, **SHARD}),
        (("1GiB", "disk", 2, "sgd"), {"clip": True, **SHARD}),
        ((TIGHT, "disk", 4, "adamw"), {"frozen": half_frozen, **SHARD}),
        ((TIGHT, "disk", 2, "sgd"), bf16 | SHARD),
        ((TIGHT, "disk", 4, "sgd"), SUMS),
    ]
    expected = [
        one_process(2, 4, "adamw", clip=True), one_process(2, 2, "sgd", clip=True),
        one_process(2, 4, "adamw", frozen=half_frozen), one_process(2, 2, "sgd", **bf16),
        one_process(2, 4, "sgd", way="sum"),
    ]  # fmt: skip
    same_in_all(2, which, expected)


@pytest.mark.parametrize("size", [2, FOUR])
def test_ranks_that_leave_out_different_blocks(size: int) -> None:
    which = [
        ((budget, "disk", micros, "sgd", update), {"prepare": leave_out, **SHARD})
        for budget, micros, update in (
            (TIGHT, size, "step"),
            (TIGHT, 2 * size, "step"),
            (TIGHT, size, "backward"),
            ("1GiB", 2 * size, "step"),
        )
    ]
    same_in_all(size, which, [one_process(size, a[2], "sgd", prepare=leave_out) for a, _ in which])


def test_shared_gradients_and_what_lies_outside_alone() -> None:
    alike = {"frozen": with_sums, "prepare": some_use_one, "clip": True}
    which = [
        (("1MiB", "disk", 2, "sgd"), alike | SHARD),
        ((TIGHT, "disk", 4, "sgd"), {"frozen": only_outside, **SHARD}),
        ((TIGHT, "disk", 4, "adamw"), {"frozen": only_the_last, **SHARD}),
    ]
    expected = [
        one_process(2, 2, "sgd", **alike),
        one_process(2, 4, "sgd", frozen=only_outside),
        one_process(2, 4, "adamw", frozen=only_the_last),
    ]
    same_in_all(2, which, expected)


def test_the_same_on_any_number_of_ranks() -> None:
    """With gradients summed, not averaged, by ranks that run four micro-batches a step together; in sixteen bits
    through masters, too."""
    half = {"dtype": torch.bfloat16, "master": "auto", "prepare": leave_out}
    which = [((TIGHT, "disk", 4, "adamw"), SUMS), ((TIGHT, "disk", 4, "adamw"), SUMS | half)]
    plainly, through_masters = in_ranks(1, variants, which)[0]
    assert plainly == one_process(1, 4, "adamw")
    same_in_all(4, which, [plainly, through_masters])


def test_copies_that_pairs_of_ranks_divide() -> None:
    """Gradients are added within each pair, then over pairs."""
    pairs = {"peers": ts.Peers(shard=2), "prepare": leave_out}
    which = [
        ((budget, home, micros, "adamw", update), pairs)
        for budget, home, micros, update in (
            (TIGHT, "disk", 8, "step"),
            (TIGHT, "disk", 4, "backward"),
            ("1GiB", "device", 8, "step"),
        )
    ]
    same_in_all(4, which, [one_process(4, a[2], "adamw", prepare=leave_out, among=2) for a, _ in which])


@pytest.mark.parametrize(
    ("engine", "home"),
    [("fake_streams", "host"), ("fake_streams", "disk"), ("adversarial", "disk")],
)
def test_every_engine(engine: str, home: str) -> None:
    """Two that find what is used before it has come, or given away before it was used."""
    more = {"engine": engine, "machine": TWO_HOPS if engine == "fake_streams" else DIRECT, "prepare": leave_out} | SHARD
    which = [((TIGHT, home, 4, "adamw", "step"), more), (("1GiB", home, 2, "adamw", "backward"), more)]
    same_in_all(2, which, [one_process(2, micros, "adamw", prepare=leave_out) for micros in (4, 2)])


def reading(rank: int, size: int, folder: str) -> Any:
    """What is between calls of a model and of its optimizer; and a run that goes on from what another has saved."""
    with streamed(rank, TIGHT, "disk", **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        for step in range(2):
            found.zero_grad()
            model(batch(step, rank)).backward()
            found.step()
        with torch.no_grad():
            loss = float(model(batch(9, 9)))
        parameter = model.blocks[1].up.weight
        refused = []
        for read in (lambda: parameter.sum(), lambda: parameter.data, model.state_dict, lambda: parameter.grad + 1):
            try:
                read()
            except InputError as error:
                refused.append(str(error))
        with ts.whole(model):
            weights = [hashlib.sha1(v.numpy().tobytes()).hexdigest() for v in model.state_dict().values()]
            gradient = float(parameter.grad.double().sum())
        saved = ts.save(folder, model=model, optimizer=found, more={"step": 2})
        state = found.state_dict()["state"]
        moments = [float(state[n]["exp_avg"].double().sum()) for n in sorted(state)]
        for step in range(2, 4):
            found.zero_grad()
            model(batch(step, rank)).backward()
            found.step()
        with ts.whole(model):
            last = [hashlib.sha1(v.numpy().tobytes()).hexdigest() for v in model.state_dict().values()]
    with streamed(rank, TIGHT, "disk", **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        assert ts.load(folder, model=model, optimizer=found) == {"more": {"step": 2}}
        for step in range(2, 4):
            found.zero_grad()
            model(batch(step, rank)).backward()
            found.step()
        with ts.whole(model):
            again = [hashlib.sha1(v.numpy().tobytes()).hexdigest() for v in model.state_dict().values()]
    return loss, weights, gradient, moments, refused, str(saved), last == again


def plainly_read(folder: str) -> Any:
    torch.set_num_threads(1)
    model = made()
    found = OPTIMIZERS["adamw"](plainly, model)
    for step in range(2):
        found.zero_grad()
        for micro in range(2):
            (model(batch(step, micro)) * 0.5).backward()
        found.step()
    with torch.no_grad():
        loss = float(model(batch(9, 9)))
    weights = [hashlib.sha1(v.numpy().tobytes()).hexdigest() for v in model.state_dict().values()]
    state = found.state_dict()["state"]
    saved = ts.save(folder, model=model, optimizer=found, more={"step": 2})
    moments = [float(state[n]["exp_avg"].double().sum()) for n in sorted(state)]
    return loss, weights, float(model.blocks[1].up.weight.grad.double().sum()), moments, saved


def test_whole_tensors_are_read_and_saved_together(tmp_path: Path) -> None:
    found = in_ranks(2, reading, str(tmp_path / "shards"), seconds=100)
    loss, weights, gradient, moments, alone = plainly_read(str(tmp_path / "alone"))
    for one in found:
        assert isinstance(one, tuple), one
        assert one[:4] == (loss, weights, gradient, moments)
        assert len(one[4]) == 4
        assert all("divided among ranks" in said and "ts.whole(model)" in said for said in one[4])
        assert one[6]
    (saved,) = {Path(one[5]) for one in found}
    for path in sorted(alone.glob("*/*.safetensors")):
        if path.parent.name != "generators":
            mine, theirs = (read_tensors(one) for one in (saved / path.relative_to(alone), path))
            assert mine.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert torch.equal(mine[name], tensor), name


def draws(rank: int, size: int, folder: str, how: str) -> Any:
    """Each rank's generators, drawn from after a save, or after a load in as many processes or others."""
    torch.manual_seed(10 + rank)
    random.seed(10 + rank)
    np.random.seed(10 + rank)
    with streamed(rank, "1MiB", "device", **SHARD) as model, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        if how == "save":
            torch.rand(3 + rank)
            ts.save(folder, model=model)
        else:
            ts.load(folder, model=model)
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    return drawn, [str(one.message) for one in told if "random generators" in str(one.message)]


def test_random_generators_of_every_rank_are_saved(tmp_path: Path) -> None:
    saved = in_ranks(2, draws, str(tmp_path), "save")
    assert len({drawn for drawn, _ in saved}) == 2
    assert in_ranks(2, draws, str(tmp_path), "load") == saved
    three, again = (in_ranks(3, draws, str(tmp_path), "load") for _ in range(2))
    assert three == again
    assert three[0][0] == saved[0][0]
    assert len({drawn for drawn, _ in three}) == 3
    for _, (said,) in three:
        assert "a save of 2 ranks is loaded by 3 ranks: the first one's random generators go on" in said
    torch.set_num_threads(1)
    ts.load(tmp_path, model=made())  # one process goes on as the first rank
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == saved[0][0]


def reads(rank: int, size: int, file: str, peers: Any, lost: str) -> Any:
    """What a rank has read of saved weights, and what the model is then."""
    found = list[str]()
    fill = Weights.fill

    def filled(self: Weights, modules: Any) -> None:
        modules = list(modules)
        found.extend(type(m).__name__ for m in modules if isinstance(m, Block))
        fill(self, modules)

    Weights.fill = filled  # type: ignore[method-assign]
    with torch.device("meta"):
        model = Net()
    where = {"weights": file} if lost != "none" or not rank else {}
    if lost == "file" and rank:
        where = {"weights": file + ".lost.safetensors"}
    model = ts.stream(model, budget="1MiB", device="cpu", home="device", peers=peers, **where)
    ts.unstream(model)
    return digest(model), len(found)


@pytest.mark.parametrize("peers", [ts.Peers(), ts.Peers(shard=True)], ids=["copies", "divided"])
def test_each_rank_reads_its_part_of_saved_weights(tmp_path: Path, peers: ts.Peers) -> None:
    model, file = made(seed=5), tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)
    first, second, third = in_ranks(3, reads, str(file), peers, "")
    assert (first[1], second[1], third[1]) == (2, 2, 1)  # of five blocks
    assert first[0] == second[0] == third[0] == digest(model)


@pytest.mark.parametrize(
    ("lost", "said"), [("file", "rank 1 could not read them"), ("none", "rank 1 gave no weights=")]
)
def test_weights_that_one_rank_cannot_read(tmp_path: Path, lost: str, said: str) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in made().state_dict().items()}, file)
    first, second = in_ranks(2, reads, str(file), ts.Peers(), lost)
    assert said in first, first
    assert (said if lost == "none" else "weights.safetensors.lost.safetensors") in second, second


def ends_while_loading(rank: int, size: int, folder: str) -> Any:
    with streamed(rank, "1MiB", "device", **SHARD) as model:
        ts.save(folder, model=model)
        if rank:
            ShardCopies.keep_part = lambda *_: os._exit(0)  # type: ignore[assignment,return-value,method-assign]
        ts.load(folder, model=model)


def test_a_rank_that_ends_while_all_load_is_one_line(tmp_path: Path) -> None:
    first, second = in_ranks(2, ends_while_loading, str(tmp_path))
    assert first.startswith("StorageError: rank 0 of 2 came to write what is divided among ranks, and not every")
    assert "\n" not in first
    assert second == "nothing: it ended"


# -- ranks that do not do the same ------------------------------------------------------------------------------------


def alone(rank: int, size: int, how: str) -> Any:
    """The second rank does something by itself."""
    budget = TIGHT if how == "budget" and rank else "1MiB"
    with streamed(rank, budget, "disk", **SHARD) as model:
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        for step in range(2):
            found.zero_grad()
            if how == "order" and rank:
                model.blocks._modules = dict(reversed(model.blocks._modules.items()))
            if how == "fails" and rank and step:
                raise ValueError("this rank's own")
            if how == "kind" and rank:
                model.eval()
            model(batch(step, rank)).backward()
            if how == "evaluates" and rank:
                with torch.no_grad():
                    model(batch(step, rank))
            if how == "reads" and rank:
                with ts.whole(model):
                    model.blocks[0].up.weight.sum()
            if how == "saves" and not rank:
                ts.save(tempfile.mkdtemp(), model=model)
            found.step()
    return "trained"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("budget", "InputError: ranks followed a plan, and what they came with"),
        ("order", "InputError: ranks do different things|InputError: ranks came to a block that no plan brings, and"),
        ("evaluates", "InputError: ranks do different things: rank 0 began step"),
        ("reads", "InputError: ranks do different things: rank 0 began step"),
        ("saves", "InputError: ranks do different things: rank 0 began ts.save"),
        ("kind", "trained"),
    ],
)
def test_what_one_rank_does_alone_is_one_line_on_every_rank(how: str, said: str) -> None:
    for found in in_ranks(2, alone, how, timeout=20):
        assert found.startswith(tuple(said.split("|"))), found


def test_a_rank_that_fails_ends_the_others_within_the_timeout() -> None:
    first, second = in_ranks(2, alone, "fails", timeout=4)
    assert second == "ValueError: this rank's own"
    assert "not every rank came" in first or "different things" in first, first


READS: dict[str, Any] = {
    "sum": lambda p: p.sum(), "data": lambda p: p.data, "detach": lambda p: p.detach(), "item": lambda p: p[0],
    "iterate": list, "numpy": lambda p: np.asarray(p), "array": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "equal": lambda p: torch.equal(p, p), "compare": lambda p: p == 1, "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p]), "product": lambda p: torch.ones(3, len(p)) @ p, "to": lambda p: p.to("cpu"),
    "cpu": lambda p: p.cpu(), "double": lambda p: p.double(), "copied": lambda p: torch.zeros(p.shape).copy_(p),
    "as_tensor": lambda p: torch.as_tensor(p) + 1, "pickle": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": copy.deepcopy, "clone": lambda p: p.clone(), "view": lambda p: p.view(-1), "T": lambda p: p.T,
    "foreach": lambda p: torch._foreach_add([p], 1), "init": nn.init.ones_, "add": lambda p: p.add_(1),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 24), p),
    "max": lambda p: p.max(), "isnan": lambda p: p.isnan().any(), "contiguous": lambda p: p.contiguous(),
    "lerp": lambda p: torch.zeros(p.shape).lerp_(p, 0.5), "storage": lambda p: p.untyped_storage(),
    "numpy_": lambda p: p.numpy(force=True),
}  # fmt: skip


def read_alone(rank: int, size: int) -> list[str]:
    """What was not refused of all that reads a parameter, or its gradient, that is away."""
    passed = []
    with streamed(rank, "1GiB", "disk", **SHARD) as model:
        model(batch(0, rank)).backward()
        parameter = model.blocks[1].up.weight
        for name, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            assert tensor.shape == (96, 24)
            assert torch.zeros_like(tensor).stride() == (24, 1)
            assert "divided among ranks" in repr(tensor)
            with warnings.catch_warnings():  # what PyTorch asks no class about gives no numbers
                warnings.simplefilter("ignore", UserWarning)
                assert torch.tensor(tensor).isnan().all()
                assert torch.empty(0).set_(tensor).isnan().all()
            for how, read in READS.items():
                try:
                    with torch.no_grad(), warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        read(tensor)
                    passed.append(f"{name}: {how}")
                except InputError as error:
                    if "ts.whole(model)" not in str(error):
                        passed.append(f"{name}: {how} says {error}")
        with ts.whole(model):
            assert torch.equal(copy.deepcopy(parameter), parameter.detach())
            with torch.no_grad():
                parameter.add_(1)
            added = parameter.detach().clone()
        with ts.whole(model):
            assert torch.equal(parameter.detach(), added)
    assert torch.equal(parameter.detach(), added)
    return passed


def test_nothing_reads_what_is_away_without_a_word() -> None:
    assert in_ranks(2, read_alone) == [[], []]


def bytes_of_a_step(rank: int, size: int, update: str) -> Any:
    """Moved in one step, by the plan; and what this rank has of all blocks between two steps."""
    with streamed(rank, "300KiB", "disk", **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model, update=update)
        for step in range(3):
            found.zero_grad()
            model(one_length(step, rank)).backward()
            found.step()
            report = ts.report(model)
        found.zero_grad()
        store = handle_of(model).store
        store.gradients.leave()
        held = sum(store.copies.nbytes_in(value, tier) for value, tier in store.copies.regions)
        every = sum(block.parameters_nbytes + size * sum(p.nbytes for p in block.state_parts) for block in store.blocks)
    return report.bytes_moved, report.plan.simulation.bytes_moved, held, every


@pytest.mark.parametrize("update", ["step", "backward"])
def test_each_rank_keeps_and_moves_its_part(update: str) -> None:
    for moved, planned, held, every in in_ranks(2, bytes_of_a_step, update):
        assert moved == planned
        assert {(S, D), (D, S), (K, D), (D, K)} == set(moved)
        assert held == every // 2


def going_on(rank: int, size: int, folder: str, first: int, last: int) -> Any:
    """Four micro-batches a step, whatever the number of ranks; from the latest save to another."""
    with streamed(rank, TIGHT, "disk", **SUMS) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        if first:
            ts.load(folder, model=model, optimizer=found)
        for step in range(first, last):
            found.zero_grad()
            for turn in range(4 // size):
                model(batch(step, turn * size + rank)).backward()
            found.step()
        ts.save(folder, model=model, optimizer=found)
    return digest(model)


@pytest.mark.filterwarnings("ignore:a save of")
def test_another_number_of_ranks_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    at_once = in_ranks(1, going_on, str(tmp_path / "alone"), 0, 3)[0]
    for size, first, last in ((4, 0, 1), (2, 1, 2), (1, 2, 3)):
        found = in_ranks(size, going_on, str(tmp_path / "ranks"), first, last)
        assert isinstance(found[0], list), found
    assert found == [at_once]


def with_large_blocks(model: Any) -> None:
    """Whose state is cut into parts that are smaller than the parameters' shard."""
    torch.manual_seed(7)
    for block in model.blocks[:2]:
        block.up, block.down = nn.Linear(24, 12000), nn.Linear(12000, 24)


def large(rank: int, size: int, update: str) -> Any:
    with streamed(rank, "18MiB", "disk", frozen=with_large_blocks, **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model, update=update)
        for step in range(3):
            found.zero_grad()
            model(batch(step, rank)).backward()
            found.step()
        parts = len(handle_of(model).store.blocks[0].state_parts)
    return parts, digest(model)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_state_in_parts(update: str) -> None:
    expected = one_process(2, 2, "adamw", frozen=with_large_blocks)
    for parts, found in in_ranks(2, large, update):
        assert parts > 1
        assert found == expected


def in_pieces(rank: int, size: int, peers: ts.Peers) -> Any:
    """Sums of blocks that are too large to be sent at once."""
    divided.SUMMED_AT_ONCE = 40000
    return trained(rank, size, TIGHT, "disk", 2 * size, "adamw", prepare=leave_out, peers=peers)


@pytest.mark.parametrize(("size", "among"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_large_blocks_are_summed_piece_by_piece(size: int, among: int) -> None:
    expected = one_process(size, 2 * size, "adamw", prepare=leave_out, among=among)
    assert in_ranks(size, in_pieces, ts.Peers(shard=2)) == [expected] * size


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InputError, match=r"shard='yes'.*it is True, or how many ranks"):
        ts.Peers(shard="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"4 ranks do not come in groups of 3; give a divisor of 4"):
        ts.Peers(shard=3).among(4)


# -- what users may do between calls ----------------------------------------------------------------------------------

WRITES: dict[str, Any] = {
    "itself": lambda m, w: w.mul_(0), "data": lambda m, w: w.data.mul_(0), "detach": lambda m, w: w.detach().mul_(0),
    "column": lambda m, w: w[:, 2].zero_(), "view": lambda m, w: w.view(-1).mul_(0),
    "state": lambda m, w: m.state_dict()["blocks.1.up.weight"].mul_(0),
    "numpy": lambda m, w: w.detach().numpy().fill(0), "copy": lambda m, w: w.copy_(torch.zeros(96, 24)),
    "gradient": lambda m, w: w.grad.data.mul_(0),
}  # fmt: skip


def writing(rank: int, size: int) -> list[str]:
    """Ways to write inside of ts.whole that were lost; what was written is that of the next reading."""
    lost = []
    with streamed(rank, "1GiB", "disk", **SHARD) as model:
        weight = model.blocks[1].up.weight
        model(batch(0, rank)).backward()
        for how, write in WRITES.items():
            with ts.whole(model), torch.no_grad():
                weight.fill_(1)
                weight.grad.fill_(1)
            with ts.whole(model), torch.no_grad():
                write(model, weight)
                model.blocks[2].up.weight.sum()  # another block comes
            with ts.whole(model):
                if float((weight.grad if how == "gradient" else weight)[:, 2].sum()):
                    lost.append(how)
    return lost


def test_what_is_written_inside_of_whole_stays() -> None:
    assert in_ranks(2, writing) == [[], []]


def gradients_kept(rank: int, size: int) -> Any:
    """Present ones may be set and changed; earlier ones are gone, and say so."""
    said = []
    with streamed(rank, "1GiB", "disk", **SHARD) as model:
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        one, other = model.blocks[1].up.weight, model.blocks[2].up.weight
        model(batch(0, rank)).backward()
        old = one.grad
        with ts.whole(model):
            kept, masked = one.grad.clone(), one.grad * torch.ones(96, 24).tril()
        one.grad.mul_(torch.ones(96, 24).tril())
        with ts.whole(model):
            assert torch.equal(one.grad, masked)
        model.zero_grad()
        model(batch(1, rank)).backward()
        for wrong in (lambda: old.mul_(2), lambda: setattr(one, "grad", other.grad) or found.step()):
            try:
                wrong()
            except GradientError as error:
                said.append(str(error)[:39])
        one.grad = kept
        with ts.whole(model):
            expected = torch.add(one.detach(), kept, alpha=-0.05)
        found.step()
        with ts.whole(model):
            return said, torch.equal(one.detach(), expected)


def test_gradients_that_are_gone_say_so_and_others_may_be_set() -> None:
    for said, same in in_ranks(2, gradients_kept):
        assert said == ["a gradient that is gone was read: it wa", "the .grad of a parameter of shape [96, "]
        assert same


class BySize(torch.optim.SGD):
    """Looks at how many numbers there are, as 8-bit optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.02 if p.numel() > 2000 else -0.01)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + self.none.sum()


def with_an_empty_block(model: Any) -> None:
    model.blocks[1] = Empty()


def written_by_one(rank: int, size: int, how: str, folder: str) -> Any:
    with streamed(rank, "1GiB", "disk", **SHARD) as model:
        weight = model.blocks[1].up.weight
        if how == "size":
            return ts.optimizer(model, BySize, lr=0.1)
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        model(batch(0, rank)).backward()
        found.step()
        if how == "loads":
            saves = [ts.save(f"{folder}/{name}", model=model) for name in ("a", "b")]
            ts.save(f"{folder}/b", model=model, more=1)
            ts.load(f"{folder}/{'ab'[rank]}", model=model)
            return saves
        if how == "part":
            ts.save(folder, block=model.blocks[0], all=nn.ModuleDict({"model": model}))
            return ts.load(folder, block=model.blocks[0])
        if how == "nowhere":
            ts.save("/proc/nowhere", model=model)
        state = found.state_dict() if how == "optimizer" else None
        with torch.no_grad():
            if how == "copy":
                weight.copy_(torch.full((96, 24), float(rank)))
            if how == "data" and rank:
                weight.data = torch.ones(96, 24)
            if how == "optimizer" and rank:
                found.load_state_dict(state)
        model(batch(0, rank)).backward()
    return "trained"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("copy", "InputError: ranks came to write what is divided among ranks, and what they came with does differ"),
        ("data", "InputError: when this call began, ranks had gradients of different parameters"),
        ("optimizer", "InputError: ranks do different things: rank 0 began a call"),
        ("loads", "InputError: ranks began ts.load(), and what they came with does differ"),
        ("size", "InputError: this optimizer looks at tensors of"),
        ("nowhere", "StorageError: "),
    ],
)
def test_what_ranks_write_and_load_must_be_the_same(how: str, said: str, tmp_path: Path) -> None:
    for found in in_ranks(2, written_by_one, how, str(tmp_path), timeout=20):
        assert found.startswith(tuple(said.split("|"))), found


def test_parts_of_a_model_are_saved_and_blocks_may_have_no_numbers(tmp_path: Path) -> None:
    assert in_ranks(2, written_by_one, "part", str(tmp_path)) == [{}, {}]
    which = [((TIGHT, "disk", 2, "adamw"), {"frozen": with_an_empty_block, **SHARD})]
    same_in_all(2, which, [one_process(2, 2, "adamw", frozen=with_an_empty_block)])
