"""`ts.Peers(shard=True)`: the bits of one plain process, of blocks of which each rank keeps a part."""

import pytest
import torch
from trainings import (
    TIGHT,
    half_frozen,
    leave_out,
    one_process,
    only_outside,
    only_the_last,
    same_in_all,
    some_use_one,
    with_sums,
)

import tapestream as ts

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:This process"),  # newer Pythons warn of forks beside threads
]
SHARD = {"peers": ts.Peers(shard=True)}
SUMS = {"peers": ts.Peers(gradients="sum", shard=True)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_of_one_process(size: int) -> None:
    which, expected = [], []
    for budget, micros, optimizer, update in (
        (TIGHT, size, "adamw", "step"),
        (TIGHT, size, "adamw", "backward"),
        (TIGHT, 2 * size, "sgd", "step"),
        ("1GiB", size, "sgd", "backward"),
        ("1GiB", 2 * size, "adamw", "step"),
    ):
        which.append(((budget, "disk", micros, optimizer, update), SHARD))
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


@pytest.mark.parametrize("size", [2, 4])
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
    """With gradients summed, not averaged, by ranks that run four micro-batches a step together."""
    which = [((TIGHT, "disk", 4, "adamw"), SUMS)]
    for size in (2, 4):
        same_in_all(size, which, [one_process(1, 4, "adamw")])
