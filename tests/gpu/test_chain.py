"""A chain on a real device gives the bits of plain PyTorch there."""

import pytest
import torch
from exact import assert_same, plain, seed
from models import CASES, Case
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.errors import BudgetError
from tapestream.frontends.chain import Chain


def run(case: Case, *, budget: int | None, planner: str) -> dict[str, torch.Tensor | None]:
    """Three steps of gradients; ``planner`` "" is plain PyTorch."""
    stages = [stage.cuda() if isinstance(stage, nn.Module) else stage for stage in case.stages()]
    owner = nn.ModuleList(stage for stage in stages if isinstance(stage, nn.Module))
    call = plain(stages) if not planner else Chain(stages, planner=planner, budget=budget)
    seed(3)
    trace: dict[str, torch.Tensor | None] = {}
    for step in range(3):
        x = case.batch().cuda()
        if case.input_requires and x.is_floating_point():
            x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
            state = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), case.state(x))
            loss = case.loss(call(state))
        loss.backward()
        trace[f"{step} loss"] = loss.detach()
        trace |= {f"{step} {n}": None if p.grad is None else p.grad.clone() for n, p in owner.named_parameters()}
        trace |= {f"{step} {n}": b.clone() for n, b in owner.named_buffers()}
        owner.zero_grad()
    return trace


def under_the_least(case: Case, planner: str) -> dict[str, torch.Tensor | None]:
    """With the budget that a refusal asks for. Sizes are measured anew each time: on a loaded machine, a profile
    has been 512 bytes larger than the one before it, for a reason not found yet, and the next refusal said so."""
    least = 1
    for _ in range(2):
        try:
            return run(case, budget=least, planner=planner)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert least == 1 or error.least_nbytes + case.slack_nbytes == least + 512  # noqa: PT017
            least = error.least_nbytes + case.slack_nbytes
    return run(case, budget=least, planner=planner)


@pytest.mark.parametrize("planner", ["auto", "bisection"])
@pytest.mark.parametrize("name", CASES)
def test_every_chain_under_the_least_budget(name: str, planner: str) -> None:
    case = CASES[name]
    assert_same(run(case, budget=None, planner=""), under_the_least(case, planner))
