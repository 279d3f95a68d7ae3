"""What people do with embeddings and heads, done where these come and go: the bits of plain PyTorch, or refused by
name."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from living import one_process
from pairs import Pair, both, sgd
from streamable import Model
from streaming import everything, state_of
from torch import nn
from wide_pairs import CASES, case, coming, learn, pair, paired
from wordy import WIDTH, words

import tapestream as ts
from tapestream.errors import GradientError, InputError

__all__ = ["case", "one_process", "pair"]  # fixtures


def test_both_come_and_go(pair: Pair) -> None:
    both(pair, learn)
    assert coming(pair[1]) == [pair[1].embed, pair[1].head]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_loss_scaling_with_clipping_and_a_step_left_out(pair: Pair) -> None:
    scales = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for number in range(4):
            loss = model(*words()) * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert_same(everything(pair[0]), everything(pair[1]))


def test_accumulation_and_clipping(pair: Pair) -> None:
    norms: list[torch.Tensor] = []

    def run(model: Any, _: Any) -> None:
        for _ in range(3):
            (model(*words()) / 3).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    both(pair, run)
    assert all(torch.equal(a, b) for a, b in zip(norms[:3], norms[3:], strict=True))


def test_a_penalty_on_the_weights_in_a_backward_of_its_own(pair: Pair) -> None:
    def run(model: Any, _: Any) -> None:
        learn(model)
        (model.head.weight.pow(2).sum() * 1e-3).backward()

    both(pair, run)


def test_a_penalty_first(pair: Pair) -> None:
    def run(model: Any, _: Any) -> None:
        (model.embed.weight.pow(2).sum() * 1e-3).backward()
        learn(model)

    both(pair, run)


def test_zeroes_instead_of_none(pair: Pair) -> None:
    def run(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        learn(model)

    both(pair, run)


def test_hooks_of_the_weights(pair: Pair) -> None:
    """Masks of rows, as are used to train new words only."""

    def mask(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[:100] = 0
        return gradient

    for model in pair[:2]:
        model.embed.weight.register_hook(mask)
    both(pair, learn)


def test_frozen_and_thawed_between_steps(pair: Pair) -> None:
    steps = iter([False, True, True] * 2)

    def run(model: Any, _: Any) -> None:
        model.embed.requires_grad_(next(steps))
        learn(model)

    both(pair, run)


def test_a_loss_of_ones_own_of_the_weight_says_what_to_do(pair: Pair) -> None:
    ours = pair[1]
    learn(ours)
    ours.zero_grad()
    with pytest.raises(GradientError, match=r"'embed.weight'.*blocks=\["):  # noqa: PT012
        loss = ours(*words()) + 1e-3 * ours.embed.weight.pow(2).sum()
        loss.backward()
    ours.zero_grad()
    pair[0].zero_grad()
    both(pair, learn, steps=1)


def test_embedded_by_hand_without_gradients(pair: Pair) -> None:
    """Similar words, as are looked for in logs."""
    near = []

    def run(model: Any, _: Any) -> None:
        learn(model)
        with torch.no_grad():
            near.append((model.embed(torch.tensor([3])) @ model.embed.weight.T).topk(5).indices)

    both(pair, run)
    assert all(torch.equal(a, b) for a, b in zip(near[:3], near[3:], strict=True))


# -- the weights -------------------------------------------------------------------------------------------------------


def test_weights_read_and_written_between_steps(pair: Pair) -> None:
    norms = []

    def run(model: Any, _: Any) -> None:
        with torch.no_grad():
            model.embed.weight[7].zero_()
            model.embed.weight.div_(model.embed.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
            norms.append(model.head.weight.norm())
            model.head.weight.data.clamp_(-2, 2)
        learn(model)

    both(pair, run)
    assert all(torch.equal(a, b) for a, b in zip(norms[:3], norms[3:], strict=True))


def test_fresh_weights_by_init(pair: Pair) -> None:
    for model in pair[:2]:
        seed(5)
        nn.init.trunc_normal_(model.head.weight, std=0.02)
    both(pair, learn)


def test_ties_are_kept(pair: Pair, tmp_path: Path) -> None:
    theirs, ours, plain, optimizer = pair
    tied = theirs.embed.weight is theirs.head.weight
    both(pair, learn, steps=1)
    held = ours.state_dict()
    assert (held["embed.weight"].data_ptr() == held["head.weight"].data_ptr()) == tied
    file, plainly, both_of_us = io.BytesIO(), io.BytesIO(), (ours, theirs)
    for model, where in zip(both_of_us, (file, plainly), strict=True):
        torch.save(model.state_dict(), where)
    assert len(file.getvalue()) <= len(plainly.getvalue()) + 64
    file = io.BytesIO()
    torch.save((held, optimizer.state_dict()), file)
    weights, state = torch.load(io.BytesIO(file.getvalue()))
    for again in paired(CASES["tied" if tied else "untied"], tmp_path / "again"):
        again[1].load_state_dict(weights)
        again[3].load_state_dict(state)
        assert (again[1].embed.weight is again[1].head.weight) == tied
        both((theirs, again[1], plain, again[3]), learn)
        assert_same(state_of(plain), state_of(again[3]))


def test_assigned_weights_are_refused(pair: Pair) -> None:
    ours = pair[1]
    ours.load_state_dict(copy.deepcopy(pair[0].state_dict()), assign=True)
    with pytest.raises(InputError, match=r"without assign=True.*unstream, replace and stream again"):
        learn(ours)


@pytest.mark.parametrize("part", ["embed", "head", "model"])
def test_copies_are_refused(part: str, pair: Pair) -> None:
    model = pair[1]
    with pytest.raises(InputError, match="cannot be copied or pickled"):
        copy.deepcopy(model if part == "model" else getattr(model, part))


@pytest.mark.parametrize("part", ["embed", "head"])
def test_other_bytes_are_refused(part: str, pair: Pair) -> None:
    with pytest.raises(InputError, match=r"before stream\(\), or call tapestream.unstream"):
        getattr(pair[1], part).to(torch.bfloat16)
    both(pair, learn, steps=1)


@pytest.mark.parametrize("part", ["embed", "head"])
def test_a_module_put_in_its_place_is_refused(part: str, pair: Pair) -> None:
    learn(pair[1])
    other = nn.Embedding(50, WIDTH) if part == "embed" else nn.Linear(WIDTH, 50)
    setattr(pair[1], part, other)
    with pytest.raises(InputError, match=r"unstream, replace and stream again"):
        pair[1](torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long))


def test_tied_after_streaming_is_refused(tmp_path: Path) -> None:
    for two in paired(CASES["untied"], tmp_path):
        two[1].head.weight = two[1].embed.weight
        with pytest.raises(InputError, match=r"unstream, replace and stream again"):
            learn(two[1])


def test_everything_is_as_before_after_unstream(case: Model, tmp_path: Path) -> None:
    for theirs, ours, plain, _ in paired(case, tmp_path):
        before = list(ours.parameters())
        both((theirs, ours, plain, sgd(ours)), learn)
        ts.unstream(ours)
        assert (type(ours.embed), type(ours.head)) == (nn.Embedding, nn.Linear)
        assert (ours.embed.weight is ours.head.weight) == (theirs.embed.weight is theirs.head.weight)
        assert all(a is b for a, b in zip(before, ours.parameters(), strict=True))
        assert_same(everything(theirs), everything(copy.deepcopy(ours)))
        both((theirs, ours, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, ours))), learn)
        ts.stream(ours, device="cpu", budget="1 GiB")  # for the fixture to undo


def test_averages(pair: Pair) -> None:
    found = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        average = torch.optim.swa_utils.AveragedModel(
            CASES["untied"].model() if model.head.bias is not None else CASES["tied"].model(),
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),
        )
        by_hand = copy.deepcopy(model.state_dict())
        for _ in range(3):
            learn(model)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            for name, tensor in model.state_dict().items():
                by_hand[name].lerp_(tensor, 0.1)
        found.append(everything(average) | {f"by hand {name}": tensor for name, tensor in by_hand.items()})
    assert_same(*found)
