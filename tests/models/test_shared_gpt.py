"""A GPT whose blocks all have the first one's parameters: they exist once, streamed or not."""

from pathlib import Path

import pytest
import torch

import tapestream as ts
from tapestream.models import GPT, GPTConfig

CONFIG = GPTConfig(5, 32, 2, vocabulary=17, context=8, shared=True)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_parameters_exist_once() -> None:
    model = GPT(CONFIG)
    assert sum(p.numel() for p in model.parameters()) == CONFIG.parameters
    first = GPT(GPTConfig(5, 32, 2, vocabulary=17, context=8)).blocks[0]
    for block in model.blocks:
        for mine, other in zip(block.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("engine", ["auto", "adversarial"])
def test_streamed_from_disk_it_trains_like_plain_pytorch(engine: str, tmp_path: Path) -> None:
    plain = GPT(CONFIG)
    with torch.device("meta"):
        model = GPT(CONFIG)
    ts.stream(model, device="cpu", budget="600 KiB", folder=tmp_path, engine=engine)
    ours = ts.optimizer(model, torch.optim.SGD, lr=0.1, update="backward")
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        losses = []
        for net, optimizer in ((model, ours), (plain, theirs)):
            loss = net(*batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other), name
