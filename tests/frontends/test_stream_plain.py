"""Where every block is at home on the device and the plan recomputes nothing, blocks run as in plain PyTorch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from pairs import CASE, Pair, batch, both, sgd
from streamable import WIDTH, Chained, Model, dense
from streaming import gradients_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module.calls.call import StreamCall
from tapestream.frontends.module.stream import handle_of

HOME = {"device": "cpu", "home": "device"}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True}),
    "one by one": (torch.optim.AdamW, {}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    cls, options = KINDS[request.param]
    theirs = CASE.model()
    with streamed(CASE, "1GiB", **HOME) as ours:
        yield theirs, ours, cls(theirs.parameters(), **options), ts.optimizer(ours, cls, master=None, **options)


@pytest.fixture
def ours() -> Iterator[nn.Module]:
    with streamed(CASE, "1GiB", **HOME) as model:
        yield model


def call_of(model: nn.Module) -> StreamCall:
    """The one call that awaits its backward."""
    (call,) = handle_of(model)._live.calls
    return call


def test_steps_with_accumulation_and_another_rate_each(pair: Pair) -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            model(batch()).square().sum().backward()
        optimizer.param_groups[0]["lr"] *= 0.9

    both(pair, run)
    for number, entries in pair[2].state_dict()["state"].items():
        for name, value in entries.items():
            mine = pair[3].state_dict()["state"][number][name]
            assert mine is value or torch.equal(torch.as_tensor(mine), torch.as_tensor(value)), name


def test_what_plain_pytorch_differentiates_is_differentiated(pair: Pair) -> None:
    """Twice through one graph, twice through a gradient, and from inside."""

    def run(model: nn.Module, optimizer: Any) -> None:
        x = batch().requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()

    both(pair, run)


def test_a_call_is_live_until_its_tape_is_gone(ours: nn.Module) -> None:
    live = handle_of(ours)._live
    loss = ours(batch()).sum()
    assert call_of(ours).plain
    loss.backward(retain_graph=True)
    assert len(live.calls) == 1
    loss.backward()
    assert not live.calls
    del loss
    out = ours(batch())
    assert len(live.calls) == 1
    del out
    assert not live.calls


def test_the_optimizer_cannot_come_between(ours: nn.Module) -> None:
    loss = ours(batch()).sum()
    with pytest.raises(InputError, match="between a forward and its backward"):
        sgd(ours)
    loss.backward()
    sgd(ours)


def test_weights_changed_before_backward_raise(ours: nn.Module) -> None:
    optimizer = sgd(ours)
    ours(batch()).square().sum().backward()
    loss = ours(batch()).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_updates_within_backward_are_never_plain(ours: nn.Module, update: str) -> None:
    sgd(ours, update)
    loss = ours(batch()).sum()
    assert call_of(ours).plain == (update == "step")
    loss.backward()


class Flipping(Chained):
    """Its blocks run in the other order when ``flip`` is set."""

    flip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in reversed(self.blocks) if self.flip else self.blocks:
            x = block(x)
        return x


class Statistics(nn.Module):
    """Keeps a running mean by a kernel that tells no version counter, as BatchNorm does, and has no other buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


def test_blocks_in_another_order_are_planned_anew() -> None:
    case = Model(lambda: Flipping(dense()), CASE.batch)
    plain = case.model()
    with streamed(case, "1GiB", **HOME) as model:
        for flip in (False, True, False):
            x = batch()
            for one in (plain, model):
                one.flip = flip
                one(x).sum().backward()
            assert_same(gradients_of(plain), gradients_of(model))


@pytest.mark.parametrize("home", ["device", "disk"])
@pytest.mark.parametrize("kept_by", ["a block", "the stem", "a BatchNorm stem"])
def test_buffers_are_not_written_twice_by_a_call_begun_again(kept_by: str, home: str, tmp_path: Path) -> None:
    """Where the order of blocks changes, the call is refused if what has run of it would count twice."""

    def build() -> nn.Module:
        stem = {"a block": nn.Identity(), "the stem": Statistics(), "a BatchNorm stem": nn.BatchNorm1d(WIDTH)}[kept_by]
        blocks = dense()
        return Flipping([nn.Sequential(b, Statistics()) if kept_by == "a block" else b for b in blocks], stem)

    folder = {} if home == "device" else {"folder": tmp_path}
    with streamed(Model(build, CASE.batch), "1GiB", device="cpu", home=home, **folder) as model:
        model(batch()).sum().backward()
        expected = [b.clone() for b in model.buffers()]
        model.flip = True
        with pytest.raises(InputError, match="was called where the profiled call of this model did not call it, and"):
            model(batch())
        assert any(not torch.equal(a, b) for a, b in zip(model.buffers(), expected, strict=True)), "nothing ran"
        model.flip = False
        model(batch()).sum().backward()


def test_changes_of_mode_are_noticed(ours: nn.Module) -> None:
    """The model is looked over at every call: frozen, replaced."""
    ours(batch()).sum().backward()
    first = handle_of(ours).last
    frozen = next(ours.parameters()).requires_grad_(False)
    frozen.grad = None
    ours(batch()).sum().backward()
    assert handle_of(ours).last is not first
    assert frozen.grad is None
    name, module = next((n, m) for n, m in ours.named_modules() if isinstance(m, nn.Linear))
    module.weight = nn.Parameter(module.weight.detach().clone())
    with pytest.raises(InputError, match=rf"parameter '{name}.weight' was replaced"):
        ours(batch())
