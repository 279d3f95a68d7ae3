"""What users do to parameters and gradients between steps."""

import copy
import io
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from pairs import CASE, Pair, both
from streamable import WIDTH
from streaming import loss_at
from torch import nn

import tapestream
from tapestream.errors import InputError
from tapestream.frontends.module import swap

# ------------------------------------------------------------------------------------------------- parameters


def test_a_copy_of_all_weights_between_steps(pair: Pair) -> None:
    """An exponential moving average that is swapped in for an evaluation."""
    averages: dict[int, dict[str, torch.Tensor]] = {}

    def run(model: nn.Module, _: Any) -> None:
        average = averages.setdefault(id(model), {n: p.detach().clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.25)
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(average[name])
            value = model(torch.ones(3, WIDTH)).sum()
            for name, p in model.named_parameters():
                p.copy_(kept[name])
        (loss_at(model, CASE) * value).backward()

    both(pair, run)


def test_data_replaced_between_steps(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5
        loss_at(model, CASE).backward()

    both(pair, run)


def test_state_dict_round_trip(pair: Pair) -> None:
    saved = [copy.deepcopy(model.state_dict()) for model in pair[:2]]
    assert_same(*saved)
    both(pair, lambda model, _: loss_at(model, CASE).backward())
    for model, state in zip(pair[:2], saved, strict=True):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
    both(pair, lambda model, _: loss_at(model, CASE).backward())


def test_replaced_parameters_are_refused(pair: Pair) -> None:
    theirs, ours, *_ = pair
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=True)
    with pytest.raises(InputError, match=r"before.weight.*replaced.*assign=True"):
        loss_at(ours, CASE)


def test_gradients_that_users_hold_stay(pair: Pair) -> None:
    held: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for which, model in enumerate(pair[:2]):
        seed(3)
        for _ in range(3):
            loss_at(model, CASE).backward()
            held[which].extend(p.grad for p in model.parameters() if p.grad is not None)
            model.zero_grad()
    for a, b in zip(held[0], held[1], strict=True):
        assert torch.equal(a, b)


def test_frozen_later_and_thawed(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        model.blocks[1].requires_grad_(False)
        loss_at(model, CASE).backward()
        model.blocks[1].requires_grad_(True)
        loss_at(model, CASE).backward()
        model.blocks[4].requires_grad_(False)
        loss_at(model, CASE).backward()
        model.blocks[4].requires_grad_(True)

    both(pair, run)


def test_batches_of_many_lengths(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for rows in (3, 1, 2, 3, 1):
            model(torch.randn(rows, WIDTH)).square().mean().backward()

    both(pair, run)


def test_hooks_on_parameters_run_once_per_backward(crowd: Pair) -> None:
    counts: list[list[str]] = []
    for model in crowd[:2]:
        seen: list[str] = []
        counts.append(seen)
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name, seen=seen: seen.append(name) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, name=name, seen=seen: seen.append("after " + name))

    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        (loss_at(model, CASE) + loss_at(model, CASE)).backward()

    both(crowd, run)
    assert sorted(counts[0]) == sorted(counts[1])


def test_a_block_looks_at_no_tensors_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a state_dict() of many blocks would take longer than saving it."""
    looked, part = list[int](), swap._part
    monkeypatch.setattr(swap, "_part", lambda tensors, prefix: looked.append(len(tensors)) or part(tensors, prefix))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(64)))
    tapestream.stream(model, device="cpu", budget="1MiB", blocks=list(model))
    found = model.state_dict()
    assert len(found) == 128
    assert sum(looked) <= 2 * 128  # the model's own look comes on top
