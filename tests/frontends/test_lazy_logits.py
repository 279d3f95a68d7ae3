"""Heads whose logits are made when they are needed: the loss has the bits of its chunks in plain PyTorch, everything
else the bits of plain PyTorch, and what can be neither raises."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import (
    VOCABULARY,
    Operation,
    assert_same,
    bfloat16,
    flat_loss,
    gradients,
    head_of,
    hidden_of,
    in_chunks,
    labels_of,
    lazy_logits,
    same,
)
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.frontends.module.lazy_logits import LazyLogits, compute_lazily


def next_word(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()


# How a model makes its loss of logits and labels, and its chunks: rows of hidden states, labels, operation, options.
Styles = dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], tuple[Any, ...]]]]
STYLES: Styles = {
    "as they are": (flat_loss, lambda h, y: (h, y, same)),
    "next word": (lambda z, y: flat_loss(z.float(), next_word(y)), lambda h, y: (h, next_word(y), same)),
    "shifted": (
        lambda z, y: nn.CrossEntropyLoss()(
            z[..., :-1, :].contiguous().view(-1, z.size(-1)), y[..., 1:].contiguous().view(-1)
        ),
        lambda h, y: (h[..., :-1, :], y[..., 1:], same),
    ),
    "sliced": (lambda z, y: flat_loss(z[:, 2:].contiguous(), y[:, 2:]), lambda h, y: (h[:, 2:], y[:, 2:], same)),
    "sliced, all dimensions": (
        lambda z, y: flat_loss(z[1:, :, :], y[1:]),
        lambda h, y: (h[1:], y[1:], same),
    ),
    "capped": (
        lambda z, y: flat_loss((torch.tanh(z / 0.7) * 0.7).float(), y),
        lambda h, y: (h, y, lambda z: torch.tanh(z / 0.7) * 0.7),
    ),
    "scaled": (lambda z, y: flat_loss(2 * z.contiguous() / 3.0, y), lambda h, y: (h, y, lambda z: 2 * z / 3.0)),
    "scaled by functions": (
        lambda z, y: flat_loss(torch.div(z, 3).mul(0.5).tanh(), y),
        lambda h, y: (h, y, lambda z: torch.div(z, 3).mul(0.5).tanh()),
    ),
    "widened before a cap": (
        lambda z, y: flat_loss((z.to(torch.float32) / 0.7).tanh(), y),
        lambda h, y: (h, y, lambda z: (z.float() / 0.7).tanh()),
    ),
    "flattened": (
        lambda z, y: F.cross_entropy(z.to(z.device).flatten(0, 1), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "flattened by function": (
        lambda z, y: F.cross_entropy(torch.flatten(z, 0, -2), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "reshaped": (
        lambda z, y: F.cross_entropy(z.reshape((y.numel(), VOCABULARY)), y.flatten()),
        lambda h, y: (h, y, same),
    ),
    "options": (
        lambda z, y: flat_loss(z, y, ignore_index=3, reduction="sum", label_smoothing=0.1) / torch.tensor(37),
        lambda h, y: (h, y.clamp(min=3), same),
    ),
    "per word": (
        lambda z, y: flat_loss(z, y, reduction="none") * 0.3,
        lambda h, y: (h, y, same),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "options": {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1},
    "per word": {"reduction": "none"},
}
FACTORS = {"options": lambda loss: loss / torch.tensor(37), "per word": lambda loss: loss * 0.3}


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize(("bias", "autocast"), [(True, False), (False, True), (True, True)])
def test_losses_have_the_bits_of_their_chunks(name: str, bias: bool, autocast: bool) -> None:
    style, chunked = STYLES[name]
    labels = labels_of().clamp(min=3) if name == "options" else labels_of()
    theirs, hidden = head_of(lazy=False, bias=bias), hidden_of()
    with bfloat16(autocast):
        rows, targets, operation = chunked(hidden, labels)
        expected = FACTORS.get(name, same)(in_chunks(theirs, rows, targets, operation, **OPTIONS.get(name, {})))
    ours, again = head_of(lazy=True, bias=bias), hidden_of()
    with bfloat16(autocast):
        logits = ours(again)
        found = style(logits, labels)
    assert logits.is_lazy()
    assert_same(gradients(expected, theirs, hidden), gradients(found, ours, again))


def test_the_loss_may_be_made_where_autocast_has_ended() -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        with bfloat16():
            logits = head(hidden) if lazy else None
            loss = None if lazy else in_chunks(head, hidden, labels_of(), same)
        loss = flat_loss(logits.float(), labels_of()) if loss is None else loss
        results.append(gradients(loss, head, hidden))
    assert_same(*results)


def with_ending(logits: Tensor) -> Tensor:
    logits[:, :, :5] = -3.0
    return flat_loss(logits.float(), labels_of())


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return flat_loss(logits, labels_of())


# What needs the logits: the results have the bits of plain PyTorch.
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: F.log_softmax(z, -1).square().mean(),
    "argmax": lambda z: z.argmax(-1),
    "widened argmax": lambda z: (z.float() / 3).view(-1, VOCABULARY).argmax(-1),
    "last word": lambda z: z[:, -1],
    "words": lambda z: z[..., :5].sum() + z[:, :, 3:4, ...].sum() + z[..., :, 1:].sum(),
    "all words": lambda z: z[:, :2, ...].sum() + z[...].mean(),
    "tensor times": lambda z: z * torch.linspace(0, 1, VOCABULARY),
    "divided by keyword": lambda z: torch.div(z, 2.0, rounding_mode="floor"),
    "whole numbers": lambda z: z.to(torch.int32),
    "view of bits": lambda z: z.detach().view(torch.int32),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), labels_of()),
    "weighted": lambda z: flat_loss(z, labels_of(), weight=torch.linspace(0, 1, VOCABULARY)),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, VOCABULARY), torch.full((21, VOCABULARY), 1 / VOCABULARY)),
    "joined": lambda z: torch.cat([z, 2 * z]),
    "second": lambda z: torch.add(torch.ones(()), z),
    "reads of a child, then of its parent": lambda z: z.float().sum() + z.mean(),
    "no gradient": lambda z: torch.no_grad()(lambda: z.softmax(-1).sum())(),
    "inference": lambda z: torch.inference_mode()(lambda: z.sum().clone())().clone(),
    "written to, then the loss": with_ending,
    "a hook, then the loss": hooked,
    "numpy": lambda z: torch.from_numpy(z.detach().float().numpy().copy()),
    "list": lambda z: torch.tensor(z.tolist()),
    "deep copy": lambda z: copy.deepcopy(z.detach()),
    "pickle": lambda z: pickle.loads(pickle.dumps(z)).detach(),
    "text": lambda z: torch.tensor(list(map(ord, repr(z.detach()) + str(z.detach()) + f"{z[0, 0, 0]:.3f}"))),
    "pointer": lambda z: torch.tensor(z.data_ptr() == z.data_ptr() and z.is_contiguous() and not z.is_leaf),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_anything_else_has_the_bits_of_plain_pytorch(name: str, autocast: bool) -> None:
    results = []
    for lazy in (False, True):
        head, hidden = head_of(lazy), hidden_of()
        with bfloat16(autocast):
            logits = head(hidden)
            if name == "view of bits":
                logits = logits.float()
            results.append(gradients(READERS[name](logits), head, hidden))
    assert_same(*results)


def test_logits_read_after_the_loss_are_made_once_and_can_be_saved() -> None:
    logits, _, _ = lazy_logits()
    flat_loss(logits, labels_of()).backward()
    assert logits.materialised() is logits.materialised()
    assert torch.equal(logits, head_of(lazy=False)(hidden_of()))
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), logits)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", [same, Tensor.float, lambda z: z[:, 1:], lambda z: z.view(-1, VOCABULARY)])
def test_questions_are_answered_as_by_logits_and_make_nothing(autocast: bool, change: Operation) -> None:
    with bfloat16(autocast):
        real, lazy = change(head_of(lazy=False)(hidden_of())), change(head_of(lazy=True)(hidden_of()))
    assert isinstance(lazy, LazyLogits)
    for ask in (
        lambda z: z.shape, lambda z: z.dtype, lambda z: z.device, lambda z: z.requires_grad, lambda z: z.ndim,
        lambda z: (z.size(), z.size(-1), z.dim(), z.numel(), len(z), z.nbytes, z.is_cuda, z.get_device()),
        lambda z: (z.is_floating_point(), z.layout, isinstance(z, Tensor)),
    ):  # fmt: skip
        assert ask(lazy) == ask(real)
    assert lazy.is_lazy()


def test_the_peak_of_a_loss_holds_no_logits() -> None:
    head = nn.Linear(64, 20_000, bias=False)
    compute_lazily(head, "auto")
    hidden, labels = torch.randn(512, 64, requires_grad=True), torch.randint(20_000, (512,))
    with ts.track_memory() as meter:
        logits = head(hidden)
        F.cross_entropy((torch.tanh(logits / 3) * 3).float(), labels).backward()
    assert logits.is_lazy()
    assert meter.peak_nbytes < 4 * head.weight.nbytes < logits.nbytes
