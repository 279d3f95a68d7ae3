"""`ts.sum_over_ranks`: the bits of one process that adds in the order of ranks."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from several import in_ranks

import tapestream as ts
from tapestream.errors import InputError

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.int64)
SHAPES = ((3, 5), (), (0,), (1000,), (7, 1, 2), (129, 63))


def numbers(rank: int, seed: int) -> list[torch.Tensor | None]:
    """Of every dtype and shape, not all of them on every rank; what is missing, and zeros of either sign, must add
    nothing."""
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    found: list[torch.Tensor | None] = []
    for number, shape in enumerate(SHAPES * len(DTYPES)):
        dtype = DTYPES[number // len(SHAPES)]
        one = torch.randn(shape, generator=drawn, dtype=torch.float64) * 10 ** torch.randint(-3, 4, (), generator=drawn)
        one = torch.where(one.abs() < 0.01, -0.0, one)
        found.append(None if (number + rank) % 5 == 0 else one.to(dtype))
    return found


def expected(size: int, seed: int) -> list[torch.Tensor | None]:
    """By one process, as ``.grad`` accumulates."""
    total: list[torch.Tensor | None] = [None] * len(numbers(0, seed))
    for rank in range(size):
        for k, one in enumerate(numbers(rank, seed)):
            if one is not None:
                total[k] = one.clone() if (before := total[k]) is None else before.add_(one)
    return total


def as_bytes(found: list[torch.Tensor | None]) -> list[Any]:
    return [
        None if one is None else (str(one.dtype), tuple(one.shape), bytes(one.reshape(-1).view(torch.uint8).tolist()))
        for one in found
    ]


def summing(rank: int, size: int) -> list[bool]:
    found = []
    for seed in range(2):
        given = numbers(rank, seed)
        before = as_bytes(given)
        total = ts.sum_over_ranks(given)
        found += [as_bytes(total) == as_bytes(expected(size, seed)), as_bytes(given) == before]
    some = ts.sum_over_ranks(torch.full((3,), 0.1 * (rank + 1)))
    assert isinstance(some, torch.Tensor)
    one = torch.full((3,), 0.1)
    for k in range(1, size):
        one += torch.full((3,), 0.1 * (k + 1))
    return [*found, torch.equal(some, one), ts.sum_over_ranks([]) == []]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_are_those_of_one_process_in_the_order_of_ranks(size: int) -> None:
    assert in_ranks(size, summing) == [[True] * 6] * size


def stepping(rank: int, size: int) -> list[Any]:
    """Three steps of four micro-batches, however many ranks share them."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    chain, drawn = ts.Chain([*model], budget="1MiB"), torch.Generator().manual_seed(5)
    for _ in range(3):
        batches = torch.randn(4, 6, 8, generator=drawn)
        total: list[Any] = [None] * 4
        for turn in range(4 // size):
            model.zero_grad()
            (chain(batches[turn * size + rank]).square().mean() / 4).backward()
            mine = [p.grad for p in model.parameters()]
            total = in_turn(total, mine, rank)
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), total, strict=True):
                p -= 0.1 * gradient
    return as_bytes(list(model.parameters()))


def in_turn(total: list[Any], mine: list[Any], rank: int) -> list[Any]:
    """Earlier turns' sum and this one's gradients: on rank 0 the sum is begun with what was there."""
    begun = mine if rank or total[0] is None else [a + b for a, b in zip(total, mine, strict=True)]
    return ts.sum_over_ranks(begun)


def test_parameters_are_the_same_on_any_number_of_ranks() -> None:
    alone = in_ranks(1, stepping)[0]
    for size in (2, 4):
        assert in_ranks(size, stepping) == [alone] * size


def in_subgroup(rank: int, size: int) -> Any:
    pair = torch.distributed.new_group([1, 2])
    if rank not in (1, 2):
        with pytest.raises(InputError, match="not in the process group"):
            ts.sum_over_ranks(torch.ones(2), pair)
        found: Any = "outside"
    else:
        found = ts.sum_over_ranks(torch.full((2,), float(rank)), pair).tolist()
    torch.distributed.barrier()
    return found


def in_mesh(rank: int, size: int) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "ranks"))
    return [ts.sum_over_ranks(torch.tensor([float(rank)]), mesh[name]).tolist() for name in ("machines", "ranks")]


def test_in_a_dimension_of_a_mesh() -> None:
    across, within = [[2.0], [4.0], [2.0], [4.0]], [[1.0], [1.0], [5.0], [5.0]]
    assert in_ranks(4, in_mesh) == [list(pair) for pair in zip(across, within, strict=True)]


def test_in_a_group_of_some() -> None:
    assert in_ranks(3, in_subgroup) == ["outside", [3.0, 3.0], [3.0, 3.0]]


def differently(rank: int, size: int, how: str) -> Any:
    if how == "shapes":
        return ts.sum_over_ranks([torch.ones(2), torch.ones(2 + rank)])
    if how == "dtypes":
        return ts.sum_over_ranks(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]))
    return ts.sum_over_ranks([torch.ones(2)] * (1 + rank))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shapes", r"the tensors number 1 to sum over ranks differ between ranks: rank 0 \['float32', \[2\]\], rank 1"),
        ("dtypes", "the tensors number 0 to sum over ranks differ"),
        ("numbers", "the numbers of tensors to sum over ranks differ between ranks: rank 0 1, rank 1 2"),
    ],
)
def test_what_differs_is_one_line_on_every_rank(how: str, said: str) -> None:
    found = in_ranks(2, differently, how)
    assert all(re.match(f"InputError: {said}", one) for one in found), found
    assert len(set(found)) == 1


def uneven(rank: int, size: int) -> Any:
    for _ in range(2 if rank == 0 else 1):
        ts.sum_over_ranks(torch.ones(2))
    if rank:
        time.sleep(8)
    return "done"


def test_a_rank_that_calls_less_ends_the_others_within_the_timeout() -> None:
    found = in_ranks(2, uneven, timeout=3)
    assert found[1] == "done"
    assert found[0].startswith(
        "StorageError: rank 0 of 2 began a sum over ranks, and not every rank came: one has ended"
    )


def dying(rank: int, size: int) -> Any:
    ts.sum_over_ranks(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        ts.sum_over_ranks(torch.ones(2))
    finally:
        assert time.monotonic() - start < 20
    return "no error"


def test_a_rank_that_dies_ends_the_others() -> None:
    found = in_ranks(3, dying)
    assert found[1] == "nothing: it ended"
    for one in (found[0], found[2]):
        assert "not every rank came" in one


def test_alone_and_without_a_group() -> None:
    with pytest.raises(InputError, match="there is no process group; start each with torchrun"):
        ts.sum_over_ranks(torch.ones(2))
    found = in_ranks(1, lambda rank, size: [one.tolist() for one in ts.sum_over_ranks([torch.ones(2)])])
    assert found == [[[1.0, 1.0]]]


def one_bad(rank: int, size: int, given: Any) -> Any:
    """The others are told, and the next sum is the next sum of all."""
    try:
        ts.sum_over_ranks(given if rank else [torch.ones(2)])
    except InputError as error:
        total = ts.sum_over_ranks(torch.ones(1))
        return str(error), total.tolist()
    return "taken"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([torch.ones(2).to_sparse()], "strided tensors"),
        ([torch.ones(2, dtype=torch.bool)], "numbers in strided tensors"),
        ([torch.ones(2).to(torch.float8_e5m2)], "numbers in strided tensors"),
        ([1.0], "not of a float"),
        ([torch.ones(2, device="meta")], "on meta"),
    ],
)
def test_what_cannot_be_added_is_refused_on_every_rank(given: Any, said: str) -> None:
    (first, total), (second, other) = in_ranks(2, one_bad, given)
    assert first.startswith("rank 1 could not begin a sum over ranks")
    assert said in first
    assert said in second
    assert total == other == [2.0]
