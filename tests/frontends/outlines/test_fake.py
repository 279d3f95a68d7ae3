"""`outlines.fake`: the meter of fake tensors says of a program what the real meter says of it."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tapestream.frontends.outlines.fake import FakeMeter, fake_tensors, faked, storages
from tapestream.storage.meter import MemoryMeter, track_memory


def product() -> object:
    left = torch.ones(64, 64)
    between = left @ left
    del left
    return between @ between


def differentiated() -> object:
    x = torch.ones(32, 64, requires_grad=True)
    return torch.autograd.grad((torch.exp(x) * 2).sum(), x)


def freeing_first() -> object:
    held = [torch.ones(1024) for _ in range(8)]
    held.clear()
    return torch.ones(2048)


def views() -> object:
    x = torch.ones(1024)
    return x.view(32, 32), x[5:], x.add_(1)


@pytest.mark.parametrize("program", [product, differentiated, freeing_first, views])
def test_bytes_of_a_program(program: Callable[[], object]) -> None:
    program()
    with track_memory() as real:
        kept = program()
    with fake_tensors("cpu") as meter, meter.measured() as found:
        kept = program()
    assert kept is not None
    # Kernels have some bytes of their own, for a number that they multiply by, say.
    assert _numbers(found) == pytest.approx(_numbers(real), abs=16)


def _numbers(meter: MemoryMeter) -> tuple[int, int, int]:
    return meter.peak_nbytes, meter.rise_nbytes, meter.end_nbytes


def flops(meter: FakeMeter) -> int:
    return sum(count * flops for (flops, _), count in meter.work.items())


def test_bytes_are_counted() -> None:
    with fake_tensors("cpu") as meter:
        x, table, rows = faked((torch.ones(8, 4), torch.ones(1000, 4), torch.ones(5, dtype=torch.int64)))
        for work, found in (
            (lambda: x + x, {(0, 3 * 128): 1}),
            (lambda: x.t().detach()[1:], {}),
            (lambda: x.add_(1), {(0, 128): 1}),
            (lambda: F.embedding(rows, table), {(0, 40 + 2 * 80): 1}),
            (lambda: table[rows], {(0, 40 + 2 * 80): 1}),
            (lambda: x[:1].expand(8, 4).neg(), {(0, 128 + 128): 1}),
            (lambda: torch.zeros(32), {(0, 128): 1}),
            (lambda: torch.empty(32), {}),
            (lambda: [x.neg() for _ in range(3)], {(0, 256): 3}),
            (lambda: x @ x.t(), {(2 * 8 * 8 * 4, 2 * 128 + 256): 1}),
            (lambda: torch._foreach_add_([x, x], 1), {(0, 256): 1}),
        ):
            with meter.counted() as counted:
                work()
            assert counted == found
            meter.work.clear()
        with meter.counted():
            x.neg()
        assert not meter.work


def test_operations_are_counted() -> None:
    x = torch.ones(8, 4, 16, 32)
    with fake_tensors("cpu") as meter:
        a, q = faked((torch.ones(3, 5), x))
        a @ a.T
        assert flops(meter) == 2 * 3 * 5 * 3
        F.scaled_dot_product_attention(q, q, q)
        full = flops(meter) - 90
        assert full == 2 * 2 * 8 * 4 * 16 * 16 * 32
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert flops(meter) == 90 + full + full // 2


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_keys_shared_by_several_heads_are_counted_for_each(heads: int) -> None:
    with fake_tensors("cpu") as meter:
        q, k, v = faked((torch.ones(8, 4, 16, 32), *(torch.ones(8, heads, 16, 32) for _ in "kv")))
        q.requires_grad_()
        product = 2 * 8 * 4 * 16 * 16 * 32
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert flops(meter) == 2 * product
        out.sum().backward()
        assert flops(meter) == (2 + 5) * product


def test_what_was_there_before_counts_nothing() -> None:
    with fake_tensors("cpu") as meter:
        x = torch.ones(1000)
        with meter.measured() as found:
            x.mul_(2)
            del x
    assert found.end_nbytes == -4000
    assert found.peak_nbytes == 0


def test_storages_are_told_apart_without_addresses() -> None:
    with fake_tensors("cpu"):
        x, y = torch.ones(10), torch.ones(20)
        assert sorted(storages([x, y, x.view(2, 5)]).values()) == [40, 80]
