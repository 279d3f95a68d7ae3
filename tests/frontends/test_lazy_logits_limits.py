"""Where lazy logits are not made, or cannot be: what is returned or raised instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import (
    VOCABULARY,
    WIDTH,
    Operation,
    assert_same,
    flat_loss,
    gradients,
    head_of,
    hidden_of,
    labels_of,
    lazy_logits,
    same,
)
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.errors import GradientError
from tapestream.frontends.module.lazy_logits import LazyLogits


def test_fewer_rows_than_labels_are_refused_as_by_logits() -> None:
    logits, _, _ = lazy_logits()
    with pytest.raises(ValueError, match="to match target batch_size"):
        flat_loss(logits[:, -3:].contiguous(), labels_of())


def double(_: Any, __: Any, output: Tensor) -> Tensor:
    assert type(output) is Tensor
    return 2 * output


PLAIN: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "no gradients": torch.no_grad()(lambda head, x: head(x)),
    "frozen": lambda head, x: head.requires_grad_(False)(x.detach()),
    "forward hook": lambda head, x: (head.register_forward_hook(double), head(x))[1],
    "backward hook": lambda head, x: (head.register_full_backward_hook(lambda *_: None), head(x))[1],
    "one row": lambda head, x: head(x[0, 0]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_logits_themselves_are_returned(name: str) -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        logits = PLAIN[name](head, hidden)
        assert type(logits) is Tensor
        results.append(gradients(logits, head, hidden))
    assert_same(*results)


def test_inputs_that_do_not_fit_are_refused_as_by_the_head() -> None:
    for x in (torch.zeros(3, WIDTH + 1), torch.zeros(3, WIDTH).double(), torch.zeros(3, WIDTH, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"mat1|dtype"):
            head_of(lazy=True)(x)


def test_a_pre_hook_is_obeyed() -> None:
    head, plain = head_of(lazy=True), head_of(lazy=False)
    head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    logits = head(hidden_of())
    assert isinstance(logits, LazyLogits)
    assert torch.equal(logits, plain(2 * hidden_of()))


@pytest.mark.parametrize("what", ["weight", "bias", "hidden", "data"])
@pytest.mark.parametrize("read", [lambda z: z.sum(), lambda z: flat_loss(z, labels_of())])
def test_operands_changed_since_then_raise(what: str, read: Operation) -> None:
    logits, head, hidden = lazy_logits()
    if what == "data":
        head.weight.data = head.weight.data.clone()
    else:
        with torch.no_grad():
            {"weight": head.weight, "bias": head.bias, "hidden": hidden}[what].mul_(2)
    with pytest.raises(GradientError, match=r"had changed.*read them before, or pass loss_chunks=None"):
        read(logits)


def test_logits_made_before_the_weights_changed_are_kept() -> None:
    logits, head, _ = lazy_logits()
    before = logits.sum()
    with torch.no_grad():
        head.weight.mul_(2)
    assert torch.equal(logits.sum(), before)


def test_what_was_derived_before_a_change_in_place_raises() -> None:
    logits, _, _ = lazy_logits()
    flat = logits.view(-1, VOCABULARY)
    halves = logits / 2
    flat.mul_(3)
    assert torch.equal(logits, 3 * head_of(lazy=False)(hidden_of()))  # a view was written to
    for read in (lambda: halves.sum(), lambda: F.cross_entropy(halves.view(-1, VOCABULARY), labels_of().flatten())):
        with pytest.raises(GradientError, match=r"changed in place.*make that tensor after the change"):
            read()


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, loss: logits.register_hook(same),
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: torch.autograd.grad(loss, logits, allow_unused=True),
        lambda logits, loss: torch.autograd.backward(loss, inputs=[logits]),
    ],
)
def test_gradients_of_logits_cannot_be_had_from_a_loss_by_chunks(ask: Callable[[Tensor, Tensor], object]) -> None:
    logits, _, _ = lazy_logits()
    loss = flat_loss(logits.float(), labels_of())
    with pytest.raises(GradientError, match=r"gradient of logits was asked for.*pass loss_chunks=None"):
        ask(logits, loss)


def test_logits_and_their_loss_may_be_differentiated_together() -> None:
    logits, _, hidden = lazy_logits()
    loss = flat_loss(logits, labels_of(), reduction="none")
    (found,) = torch.autograd.grad([loss, logits], hidden, [torch.ones_like(loss), torch.ones_like(logits)])
    real = head_of(lazy=False)(hidden)
    loss = flat_loss(real, labels_of(), reduction="none")
    (expected,) = torch.autograd.grad([loss, real], hidden, [torch.ones_like(loss), torch.ones_like(real)])
    torch.testing.assert_close(found, expected)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Passed(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


def test_code_that_cannot_be_followed_raises_and_loses_no_gradient() -> None:
    logits, _, _ = lazy_logits()
    with pytest.raises(GradientError, match=r"a custom autograd Function took them.*logits\.clone\(\)"):
        Doubled.apply(logits).sum().backward()
    with pytest.raises(GradientError, match="a custom autograd Function"):
        Passed.apply(lazy_logits()[0]).sum().backward()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(GradientError, match="otherwise than from Python"):
        lazy_logits()[0].exp()
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        results.append(gradients(Doubled.apply(head(hidden).clone()).sum(), head, hidden))
    assert_same(*results)
