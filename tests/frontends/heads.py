"""Heads with lazy logits and without, and the gradients of what is made of them."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.frontends.module.lazy_logits import LazyLogits, compute_lazily

WIDTH, VOCABULARY, SHAPE, CHUNKS = 24, 130, (3, 7), 4
Operation = Callable[[Tensor], Tensor]
Result = dict[str, Tensor | None]


def head_of(lazy: bool, bias: bool = True) -> nn.Linear:
    """The same weights at every call."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    if lazy:
        compute_lazily(head, CHUNKS)
    return head


def hidden_of(shape: tuple[int, ...] = SHAPE) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, WIDTH, requires_grad=True)


def labels_of() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(VOCABULARY, SHAPE).masked_fill(torch.rand(SHAPE) < 0.2, -100)


def lazy_logits() -> tuple[LazyLogits, nn.Linear, Tensor]:
    head, hidden = head_of(lazy=True), hidden_of()
    logits = head(hidden)
    assert isinstance(logits, LazyLogits)
    return logits, head, hidden


def gradients(loss: Tensor, head: nn.Linear, hidden: Tensor) -> Result:
    if loss.requires_grad:
        loss.sum().backward()
    return {"loss": loss.detach(), "hidden": hidden.grad} | {n: p.grad for n, p in head.named_parameters()}


def assert_same(expected: Result, found: Result) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None and other is not None:
            assert type(other) is Tensor, name
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            assert torch.equal(tensor.nan_to_num(), other.nan_to_num()), name


def in_chunks(head: nn.Module, rows: Tensor, labels: Tensor, operation: Operation, **options: Any) -> Tensor:
    """The loss of ``operation(head(rows))`` chunk by chunk, as one would write it."""
    flat, reduction = rows.flatten(0, -2), options.pop("reduction", "mean")
    size = -(-len(flat) // CHUNKS)
    losses = [
        F.cross_entropy(operation(head(h)).float(), y, reduction="none" if reduction == "none" else "sum", **options)
        for h, y in zip(flat.split(size), labels.flatten().split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses)
    total = functools.reduce(torch.add, losses)
    return total / (labels != options.get("ignore_index", -100)).sum() if reduction == "mean" else total


def same(logits: Tensor) -> Tensor:
    return logits


def flat_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1), **options)


def bfloat16(on: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()
