"""Embeddings and heads, which hold most of a model's bytes, come and go like blocks: same bits, less memory."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from streamable import Model
from streaming import ENGINES, LEVELS, assert_exact, budget_at, options_of
from torch import nn
from torch.nn import functional as F
from wordy import WORDY, Outputs, words

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.lazy_logits import compute_lazily
from tapestream.frontends.module.stream import handle_of
from tapestream.storage.meter import track_memory

MAKES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}
HOMES = {"auto": "disk", "adversarial": "disk", "fake_streams": "host"}


def check(name: str, engine: str, level: str, update: str, make: str, folder: Path, micro: int = 1) -> None:
    case, options = WORDY[name], options_of(engine, folder, HOMES[engine])
    optimizer, knobs = MAKES[make]
    budget = budget_at(
        level, case, lambda m: ts.optimizer(m, optimizer, update=update, master=None, **knobs), **options
    )
    assert_exact(case, budget, make=optimizer, knobs=knobs, update=update, micro_batches=micro, **options)


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("number", "name"), list(enumerate(WORDY)))
@pytest.mark.parametrize("update", ["step", "backward"])
def test_under_the_least_budget(number: int, name: str, update: str, tmp_path: Path) -> None:
    make, engine = ("sgd", "adamw")[number % 2], ("adversarial", "fake_streams")[number % 2]
    check(name, engine, "least", update, make, tmp_path, micro=1 + (update == "step" and number % 3 == 0))


@pytest.mark.full
@pytest.mark.parametrize(
    "setting", list(itertools.product(WORDY, ENGINES, LEVELS, ("step", "backward"), MAKES)), ids=str
)
def test_the_whole_product(setting: tuple[str, str, str, str, str], tmp_path: Path) -> None:
    check(*setting, tmp_path, micro=1 + (setting[3] == "step"))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_loss_by_chunks_is_the_heads_call(name: str, inside: bool, tmp_path: Path) -> None:
    """Whether the model computes the loss or its caller does; logits are there after the step too."""
    case = Model(lambda: Outputs(tied=name == "tied", bias=True), words)
    options = options_of("adversarial", tmp_path)

    def loss_and_logits(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = words()
        loss, logits = model(tokens, targets if inside else None)
        if loss is None:
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        return loss, logits

    found: list[dict[str, torch.Tensor]] = []
    for ours in (False, True):
        model = case.model()
        if ours:
            ts.stream(model, budget=2**30, loss_chunks=3, head="head", **options)
            optimizer: Any = ts.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, master=None)
        else:
            compute_lazily(model.head, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(3)
        if ours:
            handle_of(model).budget = ts.Budget(1)
            with pytest.raises(BudgetError) as told:
                loss_and_logits(model)
            handle_of(model).budget = ts.Budget(told.value.least_nbytes)
            torch.manual_seed(3)
        trace = {}
        for step in range(2):
            loss, logits = loss_and_logits(model)
            trace[f"{step} read before"] = logits[..., 0].detach().clone() if step == 0 else loss.detach()
            loss.backward()
            trace |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            trace |= {f"{step} after {n}": t.clone() for n, t in model.state_dict().items()}
        found.append(trace)
        if ours:
            ts.unstream(model)
            assert type(model.head) is nn.Linear
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        assert torch.equal(tensor, found[1][key]), key


class Untied(nn.Module):
    """A head that is a chain of its own, since something outside of blocks comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(2048, 128), nn.LayerNorm(128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)) for _ in "abcde")
        self.head = nn.Linear(128, 2048, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, -2), tokens.flatten())


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_head_has_gone_before_the_blocks_before_it_come_again(update: str, tmp_path: Path) -> None:
    """Each chain's backward ends with what its plan moves and updates then."""
    tokens = torch.randint(0, 2048, (2, 16))

    def peak(budget: int) -> int:
        torch.manual_seed(0)
        model, most = ts.stream(Untied(), budget=budget, folder=tmp_path, device="cpu"), 0
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=update)
        try:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(2):
                with track_memory() as meter:
                    model(tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                most = max(most, meter.peak_nbytes)
        finally:
            ts.unstream(model)
        return most

    with pytest.raises(BudgetError) as caught:
        peak(1000)
    least = caught.value.least_nbytes
    assert least is not None
    assert peak(least) <= 1.05 * least
