"""`to_dcp` and `from_dcp` where several ranks train a model, and FSDP2 beside them."""

import contextlib
import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from several import in_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from trainings import OPTIMIZERS, TIGHT, batch, made, plainly, streamed

import tapestream as ts
from tapestream.executor.shard_copies import ShardCopies
from tapestream.frontends.module.stream import is_streamed
from tapestream.frontends.saving import dcp_files

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.9's writer uses it
]
SHARD = {"peers": ts.Peers(shard=True)}
SUMS = {"peers": ts.Peers(gradients="sum", shard=True)}
MICROS = 6  # in each step, whatever the number of ranks


def no_unused(model: Any) -> None:
    """PyTorch's own calls make state for all that is trained before they load."""
    model.unused.requires_grad_(False)


def trained_alone(model: Any, cls: Any, **options: Any) -> Any:
    """An optimizer of what takes gradients, as `ts.optimizer` makes it."""
    return cls([p for p in model.parameters() if p.requires_grad], **options)


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, size: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for turn in range(MICROS // size):
            model(batch(step, turn * size + rank)).backward()
        optimizer.step()


def bits(named: dict[str, Any]) -> dict[str, str]:
    """Of each tensor, to compare it by in another process."""
    plain = {name: t.detach().contiguous() for name, t in named.items() if isinstance(t, torch.Tensor)}
    found = {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in plain.items()}
    return {name: f"{t.dtype} {list(t.shape)} {hashlib.sha1(found[name]).hexdigest()}" for name, t in plain.items()}


def all_bits(model: Any, optimizer: Any) -> dict[str, str]:
    """Of both, whole, by the names that PyTorch's own calls give them."""
    weights, state = get_state_dict(model, optimizer)
    moments = {f"{name}.{key}": t for name, found in state["state"].items() for key, t in found.items()}
    whole = {**weights, **moments}
    return bits({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in whole.items()})


def ending(model: Any, optimizer: Any) -> Any:
    """The same, of a model that ranks may divide, its optimizer's by number."""
    state = {number: bits(found) for number, found in optimizer.state_dict()["state"].items()}
    with ts.whole(model) if is_streamed(model) else contextlib.nullcontext():
        return bits(dict(model.named_parameters())), state


def sharded_by_fsdp(seed: int, optimizer: str) -> tuple[Any, Any]:
    model = made(seed)
    no_unused(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[optimizer](plainly, model)


def plain(optimizer: str, seed: int = 1) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = made(seed)
    no_unused(model)
    return model, OPTIMIZERS[optimizer](trained_alone, model)


def divided(rank: int, size: int, folder: str, optimizer: str, load: bool, until: int, home: str) -> Any:
    """A model that ranks divide: loaded, or trained for two steps and written; then trained on. What it ends as."""
    with streamed(rank, TIGHT if home == "disk" else "400KiB", home, frozen=no_unused, **SUMS) as model:
        found = OPTIMIZERS[optimizer](ts.optimizer, model)
        if load:
            ts.from_dcp(folder, model=model, optimizer=found)
        else:
            train(model, found, range(2), rank, size)
            assert ts.to_dcp(folder, model=model, optimizer=found) == Path(folder)
        train(model, found, range(2, until), rank, size)
        return ending(model, found)


def loads_plainly(folder: str, optimizer: str, model: Any = None, found: Any = None) -> tuple[Any, Any]:
    if model is None:
        model, found = plain(optimizer, 5)
    weights, state = get_state_dict(model, found)
    tree = {"model": weights, "optim": state}
    dcp.load(tree, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    set_state_dict(model, found, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    return model, found


def fsdp_loads(rank: int, size: int, folder: str, optimizer: str) -> Any:
    return all_bits(*loads_plainly(folder, optimizer, *sharded_by_fsdp(5, optimizer)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("optimizer", "home"), [("adamw", "disk"), pytest.param("sgd", "device", marks=pytest.mark.full)]
)
def test_what_ranks_divide_goes_to_fsdp_to_one_process_and_back(tmp_path: Path, optimizer: str, home: str) -> None:
    folder = str(tmp_path / "written")
    model, found = plain(optimizer)
    train(model, found, range(2))
    two = all_bits(model, found)
    train(model, found, range(2, 4))
    expected = ending(model, found)
    assert in_ranks(2, divided, folder, optimizer, False, 4, home, seconds=100) == [expected] * 2
    assert in_ranks(3, divided, folder, optimizer, True, 4, home, seconds=100) == [expected] * 3
    assert all_bits(*loads_plainly(folder, optimizer)) == two
    assert in_ranks(2, fsdp_loads, folder, optimizer) == [two] * 2


def fsdp_writes(rank: int, size: int, folder: str, optimizer: str) -> Any:
    model, found = sharded_by_fsdp(1, optimizer)
    train(model, found, range(2), rank, size)
    weights, state = get_state_dict(model, found)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    return all_bits(model, found)


def test_what_fsdp_writes_is_loaded_whole_and_divided(tmp_path: Path) -> None:
    folder = str(tmp_path / "written")
    written = in_ranks(3, fsdp_writes, folder, "adamw")[0]
    model, found = plain("adamw", 7)
    ts.from_dcp(folder, model=model, optimizer=found)
    assert all_bits(model, found) == written
    train(model, found, range(2, 4))
    expected = ending(model, found)
    assert in_ranks(2, divided, folder, "adamw", True, 4, "disk", seconds=100) == [expected] * 2


# -- memory, and what goes wrong --------------------------------------------------------------------------------------


class Watched:
    """How many bytes of tensors were there at once of those that it was shown."""

    def __init__(self) -> None:
        self.most, self._seen = 0, dict[int, tuple[int, Any]]()

    def __call__(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            storage = StorageWeakRef(tensor.untyped_storage())
            self._seen = {key: found for key, found in self._seen.items() if not found[1].expired()}
            self._seen[storage.cdata] = tensor.untyped_storage().nbytes(), storage
            self.most = max(self.most, sum(nbytes for nbytes, _ in self._seen.values()))
        return tensor


def watched(rank: int, size: int, folder: str) -> Any:
    """The most bytes that writing and loading have at once, of those of one block with its state."""
    dcp_files._FILE_NBYTES = 1
    gathered, read, look = ShardCopies.gathered, dcp_files.StoredByDcp._read, dcp_files.PlannerInTurn.lookup_object
    whole, out, into = Watched(), Watched(), Watched()
    ShardCopies.gathered = lambda *a: whole(gathered(*a))  # type: ignore[method-assign]
    dcp_files.PlannerInTurn.lookup_object = lambda *a: out(look(*a))  # type: ignore[method-assign]
    dcp_files.StoredByDcp._read = lambda *a: into(read(*a))  # type: ignore[method-assign]
    with streamed(rank, TIGHT, "disk", **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        model(batch(0, rank)).backward()
        found.step()
        ts.to_dcp(folder, model=model, optimizer=found)
        ts.from_dcp(folder, model=model, optimizer=found)
        block = sum(p.nbytes for p in model.blocks[0].parameters())
        largest = max(p.nbytes for p in model.parameters())
        steps = 4 * len(list(model.parameters()))
        return whole.most / block, out.most / block, (into.most - steps) / largest


def test_no_rank_has_more_than_a_block_or_a_parameters_state_at_once(tmp_path: Path) -> None:
    for rank, (whole, out, into) in enumerate(in_ranks(2, watched, str(tmp_path / "written"))):
        assert 1 <= whole < 3  # of five; with padding, and the one before may still be there
        assert out < 3 if not rank else out == 0  # of fifteen, moments included; what is outside of blocks stays
        assert 2 <= into < 2.1  # both moments of the largest parameter


def fails_at_the_ninth(self: Any, index: Any) -> Any:
    """In place of `PlannerInTurn.lookup_object`."""
    if index.fqn == list(self.given)[8]:
        raise OSError(errno.EIO, "the disk is gone")
    return LOOK(self, index)


def goes_wrong(rank: int, size: int, folder: str, how: str) -> Any:
    if how == "fails":
        dcp_files.PlannerInTurn.lookup_object = fails_at_the_ninth  # type: ignore[method-assign]
    with streamed(rank, TIGHT, "disk", **SHARD) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        train(model, found, range(1), rank, size)
        if how != "alone" or not rank:
            ts.to_dcp(folder, model=model, optimizer=found)
        if how == "loads":
            ts.from_dcp(folder, model=model, optimizer=None if rank else found)
        train(model, found, range(1, 2), rank, size)
    return "trained"


LOOK = dcp_files.PlannerInTurn.lookup_object
FAILED = "could not write the checkpoint {folder}: [Errno 5] the disk is gone; there is none"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "fails",
            [f"StorageError: {FAILED}", "StorageError: no rank has saved: ranks do different things: rank 0 could"],
        ),
        ("alone", ["InputError: ranks do different things: rank 0 began ts.to_dcp()"] * 2),
        (
            "in the way",
            ["InputError: a checkpoint was to be written to {folder}, which is a folder with something in"] * 2,
        ),
        ("loads", ["InputError: ranks began ts.from_dcp(), and what they came with does differ between ranks"] * 2),
    ],
)
def test_what_goes_wrong_is_one_line_on_every_rank(tmp_path: Path, how: str, said: list[str]) -> None:
    folder = tmp_path / "written"
    if how == "in the way":
        folder.mkdir()
        (folder / "mine").write_text("")
    found = in_ranks(2, goes_wrong, str(folder), how, timeout=20)
    for one, expected in zip(found, said, strict=True):
        assert one.startswith(expected.format(folder=folder)), one
    assert [path.name for path in tmp_path.rglob("*") if how != "loads"] == (
        ["written", "mine"] if "way" in how else []
    )


def copies(rank: int, size: int, folder: str) -> Any:
    with streamed(rank, TIGHT, "disk") as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        train(model, found, range(1), rank, size)
        if not rank:
            ts.to_dcp(folder, model=model, optimizer=found)
        torch.distributed.barrier()
        train(model, found, range(1, 2), rank, size)
        last = [p.detach().clone() for p in model.parameters()]
    with streamed(rank + 5, TIGHT, "disk") as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        ts.from_dcp(folder, model=model, optimizer=found)
        train(model, found, range(1, 2), rank, size)
        return all(map(torch.equal, model.parameters(), last))


def test_ranks_with_a_copy_each(tmp_path: Path) -> None:
    assert in_ranks(2, copies, str(tmp_path / "written")) == [True, True]
