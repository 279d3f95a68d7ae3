"""Recomputes that are given their attention on a real device: flash kernels in bfloat16, others in float32."""

import copy

import pytest
import torch
import torch.nn.functional as F
from keeping import keep_whatever_it_takes, kept
from torch import nn

import tapestream as ts

WIDTH, HEADS = 128, 2


class Attention(nn.Module):
    """The half of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inner(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + torch.tanh(self.out(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_plain_pytorch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_whatever_it_takes(monkeypatch)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Attention() for _ in range(5))).cuda().to(dtype)
    x = torch.randn(4, 128, WIDTH, device="cuda", dtype=dtype)
    plain(x).square().mean().backward()
    blocks = copy.deepcopy(plain)
    with pytest.raises(ts.BudgetError) as refused:
        ts.Chain(list(blocks), budget=1, home="device")(x)
    least, found = refused.value.least_nbytes, 0
    assert least is not None
    for share in (1.0, 1.2, 1.4, 1.7):
        chain = ts.Chain(list(blocks), budget=int(least * share), home="device")  # else tapes would move
        for _ in range(2):
            blocks.zero_grad()
            chain(x).square().mean().backward()
        found += kept(chain.plan)
        pairs = zip(plain.parameters(), blocks.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert found > 0
