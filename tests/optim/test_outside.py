"""The optimizer of parameters outside the blocks: wide gradients of narrow parameters are there one at a time."""

from collections.abc import MutableMapping
from typing import Any

import pytest
import torch

from tapestream.optim.common import Common, Way
from tapestream.optim.inner import Inner
from tapestream.optim.outside import Outside
from tapestream.storage.meter import track_memory

COUNT, SIZE = 8, 1 << 14


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator).to(dtype).requires_grad_() for _ in range(COUNT)]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(COUNT)]


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_wide_gradients_come_one_at_a_time_and_give_the_same_bits(cls: type[torch.optim.Optimizer]) -> None:
    half, whole = parameters(torch.bfloat16), parameters(torch.float32)
    both = [*half, *whole]
    filled = cls([torch.zeros(1)]).param_groups[0]  # type: ignore[call-arg]
    groups: list[MutableMapping[str, Any]] = [{**filled, "params": both, "lr": 1e-2}]
    inner = Inner(cls, {}, Common(cls.__name__, lambda: groups, Way()), Way(), lambda number: [])
    outside = Outside(inner, groups, both, frozenset(map(id, half)))
    masters = [p.detach().float().clone().requires_grad_() for p in half]
    others = [p.detach().clone().requires_grad_() for p in whole]
    plain = cls([*masters, *others], lr=1e-2)  # type: ignore[call-arg]
    for step in range(3):
        grads = gradients(step, torch.bfloat16), gradients(step + 3, torch.float32)
        for found, wanted, target in (
            *zip(half, grads[0], masters, strict=True),
            *zip(whole, grads[1], others, strict=True),
        ):
            skipped = step == 1 and found is half[2]
            found.grad = None if skipped else wanted.clone()
            target.grad = None if skipped else wanted.to(target.dtype)
        before = [p.grad for p in both]
        with track_memory() as meter:
            outside.step(groups)
        if step == 2:  # the states are there
            assert meter.peak_nbytes <= 3.5 * 4 * SIZE
        assert all(p.grad is g for p, g in zip(both, before, strict=True))
        plain.step()
        assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(half, masters, strict=True))
        assert all(map(torch.equal, whole, others))
