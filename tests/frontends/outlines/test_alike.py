"""`outlines.alike`: of calls that are alike two are run, and the outline is the same as if all were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tapestream.costs.rates import Rates
from tapestream.frontends.outlines import alike
from tapestream.frontends.outlines.outlining import outline
from tapestream.models import GPT, GPTConfig

WIDTH, DEPTH = 16, 8
RATES = Rates(3.0, 2.0, 1.0)
RUNS: list[int] = []


class Block(nn.Module):
    def __init__(self, index: int = 0, dilation: int = 1, hidden: int = WIDTH) -> None:
        super().__init__()
        self.index, self.dilation = index, dilation
        self.first, self.second = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        RUNS.append(1)
        return x + self.second(F.gelu(self.first(x)).roll(self.dilation, 0))


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], extra: Callable[[torch.Tensor], Any] = lambda x: ()) -> None:
        super().__init__()
        self.blocks, self.extra = nn.ModuleList(blocks), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.extra(x)
        for block in self.blocks:
            found = block(x, *more)
            x, more = (found[0], found[1:]) if isinstance(found, tuple) else (found, more)
        return x.sum()


class HandsOn(Block):
    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return (super().forward(x), *more)


class View(Block):
    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        return super().forward(x)[:]


class Odd(Block):
    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        return super().forward(super().forward(x)) if self.index % 2 else super().forward(x)


class Leaves(Block):
    """Of which the model reads what every call has left."""

    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        self.penalty = x.square().mean()
        return super().forward(x)


class Penalised(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(block.penalty for block in self.blocks)


class HalfFrozen(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in self.blocks[: DEPTH // 2]:
                x = block(x)
        for block in self.blocks[DEPTH // 2 :]:
            x = block(x)
        return x.sum()


class EveryThird(Block):
    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        return super().forward(super().forward(x)) if self.index % 3 == 2 else super().forward(x)


class Random(Block):
    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        return F.dropout(super().forward(x), 0.1)


def repeated(kind: type[Block], **more: Any) -> list[nn.Module]:
    return [kind(index, **more) for index in range(DEPTH)]


CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "alike": (lambda: Chain(repeated(Block)), True),
    "a tensor beside": (lambda: Chain(repeated(HandsOn), lambda x: (torch.ones(3), x.detach() * 2)), True),
    "dropout": (lambda: Chain(repeated(Random)), True),
    "two widths": (lambda: Chain([Block(k, hidden=16 if k % 2 else 64) for k in range(DEPTH)]), True),
    "each another number": (lambda: Chain([Block(k, dilation=1 + k) for k in range(DEPTH)]), False),
    "by the index": (lambda: Chain(repeated(Odd)), False),
    "every third by the index": (lambda: Chain(repeated(EveryThird)), False),
    "views": (lambda: Chain(repeated(View)), True),
    "something left behind": (lambda: Penalised(repeated(Leaves)), False),
    "gradients off for the first": (lambda: HalfFrozen(repeated(Block)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_an_outline_is_the_same_and_takes_fewer_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fewer = CASES[name]
    x = torch.randn(4, WIDTH)

    def found() -> tuple[Any, int]:
        RUNS.clear()
        return outline(make(), (x,)).profiles(rates=RATES), len(RUNS)

    quick, runs = found()
    monkeypatch.setattr(alike, "_ENOUGH", 10**9)
    slow, every = found()
    assert quick == slow
    assert (runs < every) == fewer


def test_a_hook_may_do_anything() -> None:
    seen = list[int]()
    model = Chain(repeated(Block))
    for block in model.blocks:
        block.register_forward_hook(lambda module, *_: seen.append(module.index))
    outline(model, (torch.randn(4, WIDTH),))
    assert set(seen) == set(range(DEPTH))


def test_a_deep_gpt_is_outlined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(256, (2, 32))
    model = GPT(GPTConfig(12, 64, 4, vocabulary=256, context=32))
    quick = outline(model, (tokens, tokens))
    monkeypatch.setattr(alike, "_ENOUGH", 10**9)
    slow = outline(model, (tokens, tokens))
    assert quick.profiles(rates=RATES) == slow.profiles(rates=RATES)
    assert quick.flops == slow.flops
