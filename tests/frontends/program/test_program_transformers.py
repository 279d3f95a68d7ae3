"""Networks as people have them, unmodified, through `Program` at three tenths of their tape: the bits of plain PyTorch,
in a first call and in one that follows a plan."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import restore, same
from torch import nn
from torch.nn import functional

from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.results import found_in

sys.path.insert(0, str(Path(__file__).parents[2] / "transformers"))
NAMES = (
    "gpt2", "llama", "qwen3", "gemma3", "mixtral", "opt", "bloom", "gpt_neox", "bert", "roberta", "t5", "vit", "resnet",
    "segformer", "swin", "whisper", "clip", "mamba",
)  # fmt: skip
Batch = Callable[[int], dict[str, Any]]


def traced(call: Callable[..., Any], model: nn.Module, batch: dict[str, Any], seed: int) -> list[torch.Tensor | None]:
    """What one call and its backward leave behind: values, gradients, buffers and the state of the generator."""
    torch.manual_seed(seed)
    model.zero_grad()
    result = call(**batch)
    found = found_in(result)
    values = [t.detach().clone() for t in found]
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = torch.stack([t.square().mean() for t in found]).sum()
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*values, *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def tight(model: nn.Module, batch: dict[str, Any], share: float) -> int:
    """Bytes: ``share`` of what a call saves, or the least that works where that is more."""
    run = Program(model, budget="1GiB", planner="revolve")
    run(**batch)
    assert run.report is not None
    asked = int(share * run.report.held_nbytes)
    while True:
        try:
            Program(model, budget=asked, planner="revolve")(**batch)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert error.least_nbytes > asked  # noqa: PT017
            asked = error.least_nbytes
        else:
            return asked


def assert_exact(model: nn.Module, batch: Batch, *, share: float = 0.3, calls: int = 2) -> Program:
    buffers = list(model.buffers())
    before = [b.clone() for b in buffers]
    expected = [traced(model, model, batch(k), k) for k in range(calls)]
    restore(buffers, before)
    torch.manual_seed(0)
    budget = tight(model, batch(0), share)
    restore(buffers, before)
    run = Program(model, budget=budget, planner="revolve")
    for k in range(calls):
        found = traced(run, model, batch(k), k)
        assert len(found) == len(expected[k])
        wrong = [place for place, (a, b) in enumerate(zip(found, expected[k], strict=True)) if not same(a, b)]
        assert not wrong, f"call {k}: {wrong} of {len(found)}"
        assert run.report is not None
        assert run.report.reruns > 0
    return run


def family(name: str, training: bool) -> tuple[nn.Module, Batch]:
    pytest.importorskip("transformers", reason="needs transformers")
    from zoo import FAMILIES

    return FAMILIES[name].model().train(training), FAMILIES[name].batch


@pytest.mark.thinned(16)
@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, marks=() if training or number % 6 == 0 else pytest.mark.full)
        for number, name in enumerate(NAMES)
        for training in (True, False)
    ],
)
def test_families(name: str, training: bool) -> None:
    assert_exact(*family(name, training))


def test_no_family_is_left_out() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from zoo import FAMILIES

    assert set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("training", [True, False])
def test_torch_transformer(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.2, batch_first=True).train(training)

    def batch(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        source, target = torch.randn(2, 7, 16, generator=generator), torch.randn(2, 5, 16, generator=generator)
        return {"src": source, "tgt": target, "tgt_mask": mask}

    run = assert_exact(model, batch)
    assert run.report is not None
    assert run.report.planned


class DenseLayer(nn.Module):
    """Norm, activation and convolution of all that earlier layers gave, and dropout."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.conv(functional.relu(self.norm(x), inplace=True))
        return torch.cat([x, functional.dropout(found, 0.2, self.training)], dim=1)


class DenseNet(nn.Module):
    """Two dense blocks and a transition between them."""

    def __init__(self, channels: int = 4, growth: int = 4, layers: int = 4) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for block in range(2):
            for _ in range(layers):
                blocks.append(DenseLayer(channels, growth))
                channels += growth
            if block == 0:
                blocks += [nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Three levels, in-place activations, skips that wait in a list, transposed convolutions and channel dropout."""

    def __init__(self, width: int = 4, levels: int = 3) -> None:
        super().__init__()
        wide = [width * 2**k for k in range(levels + 1)]
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip([1, *wide], wide, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(wide[:-1]))
        self.join = nn.ModuleList(self.block(2 * w, w) for w in reversed(wide[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True), nn.Dropout2d(0.1),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.SiLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for k, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if k else x)
            skips.append(x)
        x = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [DenseNet, UNet])
def test_convolutional_networks(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = make().train(training)
    channels = 4 if make is DenseNet else 1

    def batch(number: int) -> dict[str, Any]:
        return {"x": torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(number))}

    run = assert_exact(model, batch)
    assert run.report is not None
    assert run.report.planned


def test_the_gradient_of_a_broken_replay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program itself, which looks at the generators, else by the comparison above."""
    from tapestream.runner.ambient import TorchGenerators

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(6)))

    def batch(number: int) -> dict[str, Any]:
        return {"input": torch.randn(64, 16, generator=torch.Generator().manual_seed(number))}

    assert_exact(model, batch)
    monkeypatch.setattr(TorchGenerators, "restore", lambda self: None)
    with pytest.raises((AssertionError, GradientError)):
        assert_exact(model, batch)
