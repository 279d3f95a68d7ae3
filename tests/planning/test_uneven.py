"""Experts that take as many tokens as they are sent: what is profiled on an even batch bounds every other batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tapestream.costs import StageCost
from tapestream.planning import profile
from tapestream.planning.profile import profile_stages
from tapestream.runner.stage import Stage
from tapestream.runner.state import take_apart

WIDTH, EXPERTS, TOKENS, INNER = 16, 4, 512, 48
CPU = torch.device("cpu")


class Experts(nn.Module):
    """``top`` of four experts per token; ``stacked``: the weights of all in one tensor."""

    def __init__(self, top: int, stacked: bool) -> None:
        super().__init__()
        self.top = top
        self.before = nn.Linear(WIDTH, WIDTH)
        self.stacked = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH)) if stacked else None
        self.separate = None if stacked else nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(EXPERTS))
        with torch.no_grad():
            self.before.weight.mul_(0.01).add_(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.before(x).flatten(0, 1)
        weights, chosen = rows[:, :EXPERTS].softmax(-1).topk(self.top)
        out = torch.zeros_like(rows)
        for number in range(EXPERTS):
            token, place = torch.where(chosen == number)
            if token.numel():
                weight = self.stacked[number] if self.separate is None else self.separate[number].weight
                inner = F.gelu(F.linear(rows[token], weight)) @ weight
                out = out.index_add(0, token, inner * weights[token, place, None])
        return x + out.view_as(x)


def batch(routing: Sequence[float], top: int) -> torch.Tensor:
    """Tokens of which the share ``routing[e]`` go to expert e, and with ``top`` 2 to the next one."""
    counts = [round(share * TOKENS) for share in routing]
    expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    expert = expert[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))]
    x = 0.01 * torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x[torch.arange(TOKENS), expert] += 8
    if top == 2:
        x[torch.arange(TOKENS), (expert + 1) % EXPERTS] += 4
    return x.view(1, TOKENS, WIDTH).requires_grad_()


def cost_of(module: nn.Module, x: torch.Tensor) -> StageCost:
    return profile_stages([Stage(0, module)], take_apart(x)[0], CPU)[0].stages[0]


EVEN = (0.25, 0.25, 0.25, 0.25)
OTHERS = (
    (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0.97, 0.01, 0.01, 0.01),
    (0.01, 0.01, 0.97, 0.01), (0.01, 0.01, 0.01, 0.97), (0.5, 0, 0, 0.5), (0, 0.5, 0.5, 0),
)  # fmt: skip
BYTES = ("saved_nbytes", "forward_extra_nbytes", "recorded_extra_nbytes", "backward_extra_nbytes")


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("top", [1, 2])
def test_the_profile_of_an_even_batch_bounds_the_bytes_of_all(
    top: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Experts(top, stacked)
    bound = cost_of(module, batch(EVEN, top))
    monkeypatch.setattr(profile, "may_be_uneven", lambda nodes: False)
    even = cost_of(module, batch(EVEN, top))
    skewed = [cost_of(module, batch(routing, top)) for routing in OTHERS]
    more = {name: max(getattr(cost, name) for cost in skewed) - getattr(even, name) for name in BYTES}
    assert more["forward_extra_nbytes"] > 0  # what one even batch shows is too little
    for name in BYTES:
        assert all(getattr(bound, name) >= getattr(cost, name) for cost in skewed), name


@pytest.mark.parametrize("idle", [None, 1, 3])
def test_blocks_with_the_same_experts_are_profiled_once(idle: int | None) -> None:
    """Their routers send other numbers of tokens to each expert, so that no two tapes have the same shapes; to one
    expert of block ``idle`` they send none, so that its graph has fewer nodes."""
    torch.manual_seed(0)
    blocks = [Experts(1, stacked=False) for _ in range(4)]
    runs = [0] * len(blocks)

    def counted(number: int) -> Any:
        def count(*_: object) -> None:
            runs[number] += 1

        return count

    for number, block in enumerate(blocks):
        block.before.reset_parameters()
        block.register_forward_hook(counted(number))
        if number == idle:
            with torch.no_grad():
                block.before.bias[2] -= 100
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    found = profile_stages([Stage(k, block) for k, block in enumerate(blocks)], take_apart(x)[0], CPU)[0]
    assert len(set(found.stages)) == 1
    assert runs[0] > 4
    assert runs[1:] == [1, 1, 1]


def test_fixed_numbers_are_no_reason_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is read by fixed numbers looks like experts, and takes the same bytes for all tokens."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.order = torch.randperm(TOKENS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.gelu(self.linear(x))[:, self.order]

    found = cost_of(module := Table(), batch(EVEN, 1))
    monkeypatch.setattr(profile, "may_be_uneven", lambda nodes: False)
    plain = cost_of(module, batch(EVEN, 1))
    assert [getattr(found, name) for name in BYTES] == [getattr(plain, name) for name in BYTES]
