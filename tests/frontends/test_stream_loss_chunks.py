"""`stream(loss_chunks=)`: which head, the bits of training, what the budget then has to hold."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Trace, assert_same, copy_of, seed
from streaming import options_of, state_of, stepped
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.module.lazy_logits import LazyLogits, find_head
from tapestream.frontends.module.stream import handle_of
from tapestream.models.gpt import GPT, GPTConfig

VOCABULARY, CHUNKS, KNOBS = 300, 3, {"lr": 0.01, "weight_decay": 0.1}


def gpt(**options: Any) -> GPT:
    """The same weights at every call."""
    torch.manual_seed(0)
    return GPT(GPTConfig(3, 32, 4, **({"vocabulary": VOCABULARY, "context": 16, "dropout": 0.1} | options)))


def batch(rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (rows, 16)), torch.randint(VOCABULARY, (rows, 16))


def by_chunks(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of a plain model, chunk by chunk, of what its head was given."""
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    model(tokens)
    hook.remove()
    flat, rows = seen[0].flatten(0, -2), -(-targets.numel() // CHUNKS)
    losses = [
        F.cross_entropy(model.head(h).float(), y, reduction="sum")
        for h, y in zip(flat.split(rows), targets.flatten().split(rows), strict=True)
    ]
    return functools.reduce(torch.add, losses) / targets.numel()


def train(model: GPT, loss_of: Any, optimizer: Any, autocast: bool, gradients: bool, micro: int) -> Trace:
    """Everything that two steps leave behind."""
    seed(3)
    trace: Trace = {}
    for step in range(2):
        for part in range(micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(*batch())
            loss.backward()
            trace[f"{step}.{part} loss"] = copy_of(loss)
        trace |= stepped(model, optimizer, step, gradients=gradients)
    return trace | {"torch": torch.get_rng_state()} | state_of(optimizer)


def least(model: nn.Module, rows: int = 2) -> BudgetError:
    """Give ``model`` the least budget, by the error that one byte raises; returns that."""
    seed(3)
    with pytest.raises(BudgetError) as caught:
        model(*batch(rows))
    assert caught.value.least_nbytes is not None
    handle_of(model).budget = ts.Budget(caught.value.least_nbytes)
    return caught.value


@pytest.mark.parametrize("engine", ["auto", "adversarial"])
@pytest.mark.parametrize(
    ("budget", "autocast", "update", "tied"),
    [("1 GiB", False, "step", True), (1, False, "step", False), (1, True, "step", True), (1, True, "backward", False)],
)
def test_training_has_the_bits_of_the_chunks_in_plain_pytorch(
    engine: str, budget: Any, autocast: bool, update: str, tied: bool, tmp_path: Path
) -> None:
    plain, gradients, micro = gpt(tied=tied), update == "step", 2 if update == "step" else 1
    rule = torch.optim.AdamW(plain.parameters(), **KNOBS)
    expected = train(plain, lambda x, y: by_chunks(plain, x, y), rule, autocast, gradients, micro)
    model = gpt(tied=tied)
    ts.stream(model, budget=budget, loss_chunks=CHUNKS, head="head", **options_of(engine, tmp_path))
    ours: Any = ts.optimizer(model, torch.optim.AdamW, update=update, master=None, **KNOBS)
    if budget == 1:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            least(model)
    assert_same(expected, train(model, model, ours, autocast, gradients, micro))
    ts.unstream(model)
    assert type(model.head) is nn.Linear


def test_the_logits_it_returns() -> None:
    model = ts.stream(gpt(dropout=0.0), device="cpu", loss_chunks="auto", head="head")
    tokens, targets = batch()
    expected = gpt(dropout=0.0)(tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
        assert not isinstance(model(tokens), LazyLogits)
    ts.verify(model, (tokens, targets))
    ts.verify(model, tokens)
    optimizer: Any = ts.optimizer(model, torch.optim.SGD, lr=0.1, master=None)
    logits, later = model(tokens), model(tokens)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    assert torch.equal(logits, expected)
    del later
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    with pytest.raises(GradientError, match=r"changed \(by optimizer.step\(\), say\)"):
        logits.argmax(-1)
    ts.unstream(model)


def test_a_budget_taken_by_logits_says_what_helps_and_it_does(tmp_path: Path) -> None:
    needs = {}
    for chunks in (None, "auto"):
        with torch.random.fork_rng():
            model = gpt(vocabulary=20_000)
        ts.stream(model, budget=1, loss_chunks=chunks, head=chunks and "head", **options_of("auto", tmp_path))
        refused = least(model, rows=20)
        assert ("stream(..., loss_chunks='auto') never makes all logits" in str(refused)) == (chunks is None)
        model(*batch(rows=20)).backward()
        needs[chunks] = refused.least_nbytes
        ts.unstream(model)
    logits = 4 * 20 * 16 * 20_000
    assert needs[None] - needs["auto"] > 2 * logits


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Model(nn.Module):
    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def test_a_patched_head_is_refused() -> None:
    model = Model(nn.Linear(4, 4))
    assert find_head(model, None, []) is model.head
    model.head.forward = lambda x: x
    with pytest.raises(InputError, match=r"forward is nn\.Linear's own"):
        find_head(model, None, [])


REFUSED: dict[str, tuple[Model, dict[str, Any], str]] = {
    "chunks": (Model(nn.Linear(4, 4)), {"loss_chunks": 0}, r"loss_chunks=0 is neither \"auto\" nor a positive"),
    "truth": (Model(nn.Linear(4, 4)), {"loss_chunks": True}, "loss_chunks=True is neither"),
    "head alone": (Model(nn.Linear(4, 4)), {"head": "head"}, "head='head' is used by loss_chunks alone"),
    "none": (Model(None), {"loss_chunks": 2}, r"looked for it at get_output_embeddings\(\), .* Model is nothing; name"),
    "class": (Model(Adapted(4, 4)), {"loss_chunks": 2}, r"which in this Model is a Adapted; name the layer"),
    "name": (Model(None), {"loss_chunks": 2, "head": "top"}, r"looked for it at head='top', which in this Model is no"),
    "block": (Model(None), {"loss_chunks": 2, "head": "blocks.1"}, "head='blocks.1' lies in one; leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_are_refused_by_name_and_left_alone(name: str) -> None:
    model, options, text = REFUSED[name]
    classes = [type(m) for m in model.modules()]
    with pytest.raises(InputError, match=text):
        ts.stream(model, device="cpu", **options)
    assert [type(m) for m in model.modules()] == classes
