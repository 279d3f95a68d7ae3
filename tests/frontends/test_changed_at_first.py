"""Models that make or replace something in their first call, and draw random numbers for it: what the profiled call has
made is gone in the call that counts."""

from pathlib import Path

import pytest
import torch
from streaming import options_of
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

WIDTH = 16


class Late(nn.Dropout):
    """What takes the place of another module."""


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.drop, self.how = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), how

    def replace(self) -> None:
        if not isinstance(self.drop, Late):
            nn.Linear(WIDTH, WIDTH)  # draws
            self.drop = Late(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "module":
            self.replace()
        if self.how == "parameter" and not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.randn(WIDTH))
        out: torch.Tensor = x + self.drop(torch.tanh(self.linear(x)))
        return out * self.scale if self.how == "parameter" else out


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("") for _ in range(4))
        self.first, self.how = nn.Identity(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "modules of blocks":
            for block in self.blocks:
                block.replace()  # type: ignore[operator]
        if self.how == "own module" and isinstance(self.first, nn.Identity):
            nn.Linear(WIDTH, WIDTH)
            self.first = Late(0.3)  # type: ignore[assignment]
        if self.how == "own attribute" and not hasattr(self, "scale"):
            self.scale = torch.randn(WIDTH)
        x = self.first(x * self.scale if self.how == "own attribute" else x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(how: str, home: str = "", folder: Path = Path()) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, x = Net(how), torch.randn(8, WIDTH)
    if home:
        ts.stream(net, budget="1GiB", **options_of("threads", folder, home, "cpu"))
    optimizer = ts.optimizer(net, torch.optim.AdamW) if home else torch.optim.AdamW(net.parameters())
    torch.manual_seed(1)
    left = []
    for _ in range(3):
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach().clone())
    return [*left, *(p.detach().clone() for p in net.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("home", ["device", "disk"])
@pytest.mark.parametrize("how", ["modules of blocks", "own module", "own attribute"])
def test_what_a_model_makes_in_its_first_call_is_made_in_the_one_that_counts(
    how: str, home: str, tmp_path: Path
) -> None:
    wanted, found = trained(how), trained(how, home, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("how", ["module", "parameter"])
def test_a_stage_that_draws_what_it_is_made_of_is_refused_by_the_name_of_it(how: str) -> None:
    torch.manual_seed(0)
    blocks = [Block(how) for _ in range(3)]
    chain = ts.Chain(blocks, budget="1MiB")
    with pytest.raises(InputError, match=r"changes 'Block\.(drop|scale)', which changes what the next run returns"):
        chain(torch.randn(8, WIDTH, requires_grad=True))
    assert not any(isinstance(block.drop, Late) or hasattr(block, "scale") for block in blocks)
