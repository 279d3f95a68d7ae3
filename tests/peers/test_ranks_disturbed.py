"""Ranks whose users' code talks to others, that are slow, that collect garbage, that fail or are killed."""

import contextlib
import gc
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from several import in_ranks
from torch import distributed, nn
from trainings import (
    OPTIMIZERS,
    STEPS,
    TIGHT,
    Block,
    batch,
    digest,
    leave_out,
    made,
    one_process,
    streamed,
    trained,
)

import tapestream as ts
from tapestream.peers.agreement import Agreement

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
]
WAYS = [ts.Peers(), ts.Peers(shard=True)]
_SENDING = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "isend", "irecv", "all_to_all_single")


def _told(*_: Any) -> None:
    distributed.all_reduce(torch.ones(2))


def with_collectives(rank: int, size: int, where: str, peers: ts.Peers, update: str) -> Any:
    with streamed(rank, TIGHT, "disk", peers=peers) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model, update=update)
        for p in model.parameters():
            if where == "gradients":
                p.register_hook(_told)
            elif where == "accumulated":
                p.register_post_accumulate_grad_hook(_told)
        for block in model.blocks if where == "modules" else ():
            block.register_full_backward_hook(_told)
        for step in range(STEPS):
            found.zero_grad()
            model(batch(step, rank)).backward()  # of another length on each rank, so that their plans differ
            found.step()
        ts.unstream(model)
        done = digest(model)
        ts.stream(model, budget="1MiB", device="cpu")
    return done


@pytest.mark.parametrize("peers", WAYS)
@pytest.mark.parametrize(
    ("where", "update"),
    [("gradients", "step"), ("accumulated", "step"), ("accumulated", "backward"), ("modules", "step")],
)
def test_collectives_in_hooks_run_in_one_order_on_all_ranks(where: str, update: str, peers: ts.Peers) -> None:
    assert in_ranks(2, with_collectives, where, peers, update) == [one_process(2, 2, "adamw")] * 2


def disturbed(rank: int, size: int, how: str, peers: ts.Peers) -> Any:
    drawn = random.Random(7 + rank)
    if how == "garbage":
        gc.freeze()
        gc.set_threshold(drawn.randrange(20, 60) if rank else 700, 2, 1)
    for name in _SENDING if how == "delays" else ():
        setattr(distributed, name, _delayed(getattr(distributed, name), drawn))
    return trained(rank, size, TIGHT, "disk", size, "adamw", "backward", peers=peers, prepare=leave_out)


def _delayed(send: Any, drawn: random.Random) -> Any:
    def later(*args: Any, **options: Any) -> Any:
        time.sleep(drawn.random() * 0.004)
        return send(*args, **options)

    return later


@pytest.mark.parametrize("peers", WAYS)
@pytest.mark.parametrize("how", ["delays", "garbage"])
def test_slow_ranks_and_garbage_change_no_bit(how: str, peers: ts.Peers) -> None:
    assert in_ranks(3, disturbed, how, peers, seconds=150) == [one_process(3, 3, "adamw", prepare=leave_out)] * 3


def failing(rank: int, size: int, how: str, peers: ts.Peers) -> Any:
    def fail(*_: Any) -> None:
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise ValueError("this rank's own")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
    with tempfile.TemporaryDirectory() as folder:
        model = ts.stream(made(), budget=TIGHT, device="cpu", home="disk", folder=folder, peers=peers)
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        for step in range(2):
            if step and rank and how == "backward":
                model.blocks[2].register_full_backward_hook(fail)
            elif step and rank:
                model.blocks[2].register_forward_hook(fail)
            try:
                model(batch(step, rank)).backward()
                found.step()
            except KeyboardInterrupt:
                return "interrupted"
    return "trained"


@pytest.mark.parametrize("peers", WAYS)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("interrupted", "interrupted"),
        pytest.param("forward", "ValueError: this", marks=pytest.mark.full),
        ("backward", "ValueError: this"),
    ],
)
def test_a_rank_that_fails_in_a_block_ends_the_others_by_name(how: str, said: str, peers: ts.Peers) -> None:
    other, own = in_ranks(2, failing, how, peers, timeout=8)
    assert own.startswith(said)
    assert other.startswith(("StorageError: rank 0 of 2 came to", "InputError: ranks do different things")), other


def in_another_group(rank: int, size: int, folder: str, peers: ts.Peers) -> Any:
    with streamed(rank, TIGHT, "disk", peers=peers) as model:
        found = OPTIMIZERS["sgd"](ts.optimizer, model)
        for step in range(2):
            model(batch(step, rank)).backward()
            found.step()
            distributed.destroy_process_group()
            distributed.init_process_group("gloo", init_method=f"file://{folder}/new", rank=rank, world_size=size)
    return "trained"


@pytest.mark.parametrize("peers", WAYS)
def test_another_group_than_before_is_named(peers: ts.Peers, tmp_path: Path) -> None:
    for found in in_ranks(2, in_another_group, str(tmp_path), peers, timeout=20):
        assert found.startswith("InputError: a rank came to"), found
        assert "process group that its model was given to is gone" in found


def saved_apart(rank: int, size: int, parent: str, how: str) -> Any:
    own = Path(parent) / str(rank)
    with streamed(rank, TIGHT, "disk", peers=ts.Peers(shard=True)) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        model(batch(0, rank)).backward()
        found.step()
        try:
            if how == "save":
                ts.save(own, model=model, optimizer=found)
            else:
                ts.to_dcp(own / "found", model=model, optimizer=found)
        except ts.InputError as error:
            model(batch(0, rank)).backward()  # nothing is lost
            return str(error)
    return "saved"


@pytest.mark.parametrize("how", ["save", "to_dcp"])
def test_a_folder_that_not_all_ranks_see_is_refused_before_anything_is_written(how: str, tmp_path: Path) -> None:
    for said in in_ranks(2, saved_apart, str(tmp_path), how, timeout=20):
        assert f"ts.{how}() writes to {tmp_path / '0'} on rank 0, and rank 1 does not see that folder" in said, said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def killed_while_saving(rank: int, size: int, folder: str, who: int, when: int) -> Any:
    with streamed(rank, TIGHT, "disk", peers=ts.Peers(shard=True)) as model:
        found = OPTIMIZERS["adamw"](ts.optimizer, model)
        model(batch(0, rank)).backward()
        found.step()
        ts.save(folder, model=model, optimizer=found, step=1)
        model(batch(1, rank)).backward()
        found.step()
        told, waited = Agreement.told, Agreement.waited
        left = [when]

        def counted(call: Any) -> Any:
            def counting(*args: Any) -> Any:
                left[0] -= 1
                if rank == who and not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)

            return counting

        Agreement.told, Agreement.waited = counted(told), counted(waited)  # type: ignore[method-assign]
        with contextlib.suppress(ts.TapestreamError):
            ts.save(folder, model=model, optimizer=found, step=2)
        os._exit(0)  # what is divided cannot be made whole again without the other


@pytest.mark.parametrize(
    ("who", "when"),
    [(0, 12), (1, 12), *(pytest.param(*one, marks=pytest.mark.full) for one in ((0, 2), (0, 40), (1, 2), (1, 40)))],
)
def test_killed_while_all_save_the_last_save_is_whole(who: int, when: int, tmp_path: Path) -> None:
    in_ranks(2, killed_while_saving, str(tmp_path), who, when, timeout=8)
    model = made()
    optimizer = OPTIMIZERS["adamw"](lambda target, cls, **options: cls(target.parameters(), **options), model)
    assert ts.load(tmp_path, model=model, optimizer=optimizer)["step"] in (1, 2)
    first = made()
    step = OPTIMIZERS["adamw"](lambda target, cls, **options: cls(target.parameters(), **options), first)
    ts.load(tmp_path / "000001", model=first, optimizer=step)
    ts.save(tmp_path, model=first, optimizer=step, keep=9)  # the next one finds its way
    assert all(path.name.isdigit() for path in tmp_path.iterdir() if not path.name.startswith(".saving"))


class Towers(nn.Module):
    """Two chains of blocks, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = (nn.ModuleList(Block(24) for _ in range(3)) for _ in range(2))
        self.left_out: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = x.repeat(1, 3), x.sum() * 0
        for name in ("one", "other"):
            if name != self.left_out:
                y = x
                for block in getattr(self, name):
                    y = block(y)
                total = total + y.square().mean()
        return total


def _left_out_by(rank: int, step: int, which: str) -> str | None:
    return which if rank == 1 and step in (1, 2) else None


def towers(rank: int, size: int, which: str, update: str, peers: ts.Peers) -> Any:
    model = Towers()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = ts.stream(model, budget="400KiB", device="cpu", home="disk", folder=folder, peers=peers)
        found = OPTIMIZERS["sgd"](ts.optimizer, model, update=update)
        for step in range(4):
            found.zero_grad()
            model.left_out = _left_out_by(rank, step, which)
            model(batch(step, rank)).backward()
            found.step()
        ts.unstream(model)
        return digest(model)


def plain_towers(size: int, which: str) -> list[str]:
    model = Towers()
    found = OPTIMIZERS["sgd"](lambda target, cls, **options: cls(target.parameters(), **options), model)
    for step in range(4):
        found.zero_grad()
        for rank in range(size):
            model.left_out = _left_out_by(rank, step, which)
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(model(batch(step, rank)), parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient * (1 / size)
                    p.grad = gradient.clone() if p.grad is None else p.grad.add_(gradient)
        found.step()
    return digest(model)


@pytest.mark.parametrize("peers", WAYS)
@pytest.mark.parametrize(
    ("which", "update"),
    [
        ("one", "step"),
        ("other", "backward"),
        *(pytest.param(*o, marks=pytest.mark.full) for o in (("one", "backward"), ("other", "step"))),
    ],
)
def test_a_rank_may_leave_out_a_whole_chain(which: str, update: str, peers: ts.Peers) -> None:
    assert in_ranks(2, towers, which, update, peers, timeout=15) == [plain_towers(2, which)] * 2
