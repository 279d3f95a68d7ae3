"""The longest call is planned before the first one; a call that does not fit says into how many parts it does."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exact import Trace, assert_same, copy_of, seed
from place import DEVICE
from streaming import all_of, gradients_of, options_of, state_of
from torch import nn

import tapestream as ts
from tapestream.frontends.module import streamed
from tapestream.frontends.module.calls import profiling
from tapestream.frontends.module.calls.sizes import resized
from tapestream.frontends.module.observing import observe as observing

WIDTH, SHORT, LONG = 16, 8, 240
HOMES = ("device", "disk")


class Noisy(nn.Module):
    """Running statistics, dropout, and a tape that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.norm(self.linear(x)).tanh(), 0.2, self.training)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Noisy() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def net() -> Headed:
    torch.manual_seed(1)
    return Headed().to(DEVICE)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, WIDTH, generator=generator), torch.randint(WIDTH, (samples,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


def adam(model: nn.Module, *, streamed: bool) -> torch.optim.Optimizer:
    if streamed:
        return ts.optimizer(model, torch.optim.Adam, lr=0.01, master=None)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *parts: tuple[torch.Tensor, ...]) -> Trace:
    """The losses of ``parts``, and their gradients before the update."""
    trace: Trace = {}
    for number, part in enumerate(parts):
        loss = model(*part) / len(parts)
        loss.backward()
        trace[f"loss {number}"] = copy_of(loss)
    trace |= gradients_of(model)
    optimizer.step()
    optimizer.zero_grad()
    return trace


def generators() -> Trace:
    python, numbers = random.getstate()[1], numpy.random.get_state()[1]
    trace: Trace = {"torch": torch.get_rng_state(), "python": torch.tensor(python)}
    return trace | {"numpy": torch.tensor(numbers.astype("int64"))}


def all_there_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
    return all_of(model) | state_of(optimizer) | generators()


def least_of(samples: int, options: dict[str, Any]) -> int:
    """The least budget for a batch of so many."""
    model = ts.stream(net(), budget=1, **options)
    adam(model, streamed=True)
    with pytest.raises(ts.BudgetError) as refused:
        model(*batch(samples))
    ts.unstream(model)
    assert refused.value.split is None  # one sample is too much, too
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def between(share: float, options: dict[str, Any]) -> int:
    """A budget that the short batch fits, and the long one does not."""
    short, long = least_of(SHORT, options), least_of(LONG, options)
    return short + int(share * (long - short))


@pytest.mark.parametrize("home", HOMES)
def test_planning_for_the_longest_call_changes_nothing(home: str, tmp_path: Path) -> None:
    options = options_of("auto", tmp_path, home)
    found = []
    for longest in (None, batch(LONG)):
        model = ts.stream(net(), budget="1GiB", longest=longest, **options)
        optimizer = adam(model, streamed=True)
        seed(3)
        traces = [step(model, optimizer, batch(SHORT)) | all_there_is(model, optimizer) for _ in range(2)]
        found.append(traces)
        told = str(ts.report(model))
        assert ("samples/s with 240 samples" in told) == ("samples/s with 8 samples" in told) == (longest is not None)
        ts.unstream(model)
    for without, with_it in zip(*found, strict=True):
        assert_same(without, with_it)


def refused_at_the_first(model: Any, optimizer: Any, least: int) -> ts.BudgetError:
    """The first call says that the longest one needs ``least`` bytes, and changes nothing."""
    seed(3)
    before = all_there_is(model, optimizer)
    with pytest.raises(ts.BudgetError, match="the longest call") as refused:
        model(*batch(SHORT))
    assert refused.value.least_nbytes == least
    assert_same(before, all_there_is(model, optimizer))
    return refused.value


@pytest.mark.parametrize("home", HOMES)
def test_what_does_not_fit_the_longest_call_is_refused_at_the_first(home: str, tmp_path: Path) -> None:
    options = options_of("auto", tmp_path, home)
    short, long = least_of(SHORT, options), least_of(LONG, options)
    assert short < long
    model = ts.stream(net(), budget=(short + long) // 2, longest=batch(LONG), **options)
    optimizer = adam(model, streamed=True)
    assert refused_at_the_first(model, optimizer, long).split is not None
    ts.unstream(model)
    model = ts.stream(net(), budget=long, longest=batch(LONG), **options)
    optimizer = adam(model, streamed=True)
    for samples in (SHORT, LONG):
        step(model, optimizer, batch(samples))
    ts.unstream(model)


@pytest.mark.parametrize("home", HOMES)
def test_a_refused_call_leaves_all_as_it_was_and_fits_in_parts(home: str, tmp_path: Path) -> None:
    options = options_of("auto", tmp_path, home)
    model = ts.stream(net(), budget=between(0.5, options), **options)
    optimizer = adam(model, streamed=True)
    seed(3)
    found = [step(model, optimizer, batch(SHORT))]
    before = all_there_is(model, optimizer)
    with pytest.raises(ts.BudgetError) as refused:
        model(*batch(LONG))
    assert_same(before, all_there_is(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    split = refused.value.split
    assert split is not None
    assert f"Cut into {split} equal parts" in str(refused.value)
    found.append(step(model, optimizer, *parts_of(LONG, split)) | all_there_is(model, optimizer))
    ts.unstream(model)
    plain = net()
    theirs = adam(plain, streamed=False)
    seed(3)
    assert_same(step(plain, theirs, batch(SHORT)), found[0])
    assert_same(step(plain, theirs, *parts_of(LONG, split)) | all_there_is(plain, theirs), found[1])


def parts_of(samples: int, number: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(t.chunk(number) for t in batch(samples)), strict=True))


def test_fewer_parts_than_the_split_says_are_refused(tmp_path: Path) -> None:
    options = options_of("auto", tmp_path)
    for share in (0.3, 0.8):
        model = ts.stream(net(), budget=between(share, options), **options)
        optimizer = adam(model, streamed=True)
        with pytest.raises(ts.BudgetError) as refused:
            model(*batch(LONG))
        split = refused.value.split
        assert split is not None
        fewer = [n for n in range(2, split) if LONG % n == 0]
        for number in fewer:
            with pytest.raises(ts.BudgetError):
                step(model, optimizer, *parts_of(LONG, number))
            optimizer.zero_grad()
        step(model, optimizer, *parts_of(LONG, split))
        ts.unstream(model)


def test_the_longest_call_is_planned_beside_gradients_as_soon_as_there_are_some(tmp_path: Path) -> None:
    options = options_of("auto", tmp_path, "device")
    enough = least_of(LONG, options)
    for longest in (None, batch(LONG)):
        model = ts.stream(net(), budget=enough, longest=longest, **options)
        optimizer = adam(model, streamed=True)
        model(*batch(SHORT)).backward()
        if longest is None:
            model(*batch(SHORT)).backward()
            with pytest.raises(ts.BudgetError, match="gradients of an earlier backward"):
                model(*batch(LONG))
        else:
            with pytest.raises(ts.BudgetError, match=r"the longest call.*gradients of an earlier backward") as refused:
                model(*batch(SHORT))
            assert refused.value.split is not None
        optimizer.step()
        ts.unstream(model)


def test_a_call_that_was_refused_is_not_observed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of("auto", tmp_path)
    model = ts.stream(net(), budget=between(0.5, options), **options)
    observed = []

    def observe(*args: Any) -> Any:
        observed.append(args)
        return profiling.observe_call(*args)

    monkeypatch.setattr(streamed, "observe_call", observe)
    said = []
    for _ in range(2):
        observed.clear()
        with pytest.raises(ts.BudgetError) as refused:
            model(*batch(LONG))
        said.append((str(refused.value), refused.value.split))
    assert said[0] == said[1]
    assert len(observed) == 1  # a single sample, which is too little for BatchNorm, not too much for the budget
    for part in parts_of(LONG, said[0][1]):
        model(*part).backward()
    assert len(observed) == 1
    ts.unstream(model)


def test_a_batch_that_nobody_can_cut_has_no_split(tmp_path: Path) -> None:
    class Held:
        def __init__(self) -> None:
            self.x = batch(LONG)[0]

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Headed()

        def forward(self, held: Held, y: torch.Tensor) -> torch.Tensor:
            return self.net(held.x, y)

    options = options_of("auto", tmp_path)
    model = ts.stream(Taking().to(DEVICE), budget=between(0.5, options), **options)
    with pytest.raises(ts.BudgetError) as refused:
        model(Held(), batch(LONG)[1])
    assert refused.value.split is None
    ts.unstream(model)


def test_plan_says_how_fast_both_lengths_are() -> None:
    plan = ts.plan(net(), batch(SHORT), longest=batch(LONG), budget="1GiB", device=DEVICE)
    assert [pace.size for pace in plan.paces] == [(SHORT,), (LONG,)]
    assert all(pace.unit == "samples" and pace.per_second == pace.size[0] / pace.seconds for pace in plan.paces)
    assert str(plan).count("samples/s") == 2
    assert ts.plan(net(), batch(SHORT), budget="1GiB", device=DEVICE).paces == ()
    with pytest.raises(ts.InputError, match="holds no tensor"):
        ts.stream(net(), longest=LONG)


@pytest.mark.parametrize("home", HOMES)
def test_a_shape_stands_for_a_call_like_the_first_one(home: str, tmp_path: Path) -> None:
    options = options_of("auto", tmp_path, home)
    needed = least_of(LONG, options)
    for shape in ((LONG, WIDTH), [LONG, WIDTH], torch.Size((LONG, WIDTH))):
        model = ts.stream(net(), budget=needed - 1, longest=shape, **options)
        optimizer = adam(model, streamed=True)
        refused_at_the_first(model, optimizer, needed)
        ts.unstream(model)
    model = ts.stream(net(), budget=needed, longest=(LONG, WIDTH), **options)
    optimizer = adam(model, streamed=True)
    for samples in (SHORT, LONG):
        step(model, optimizer, batch(samples))
    ts.unstream(model)
    plan = ts.plan(net(), batch(SHORT), longest=(LONG, WIDTH), budget="1GiB", device=DEVICE)
    assert [pace.size for pace in plan.paces] == [(SHORT,), (LONG,)]


@pytest.mark.parametrize("shape", [(LONG,), (LONG, WIDTH, 1), (0, WIDTH)])
def test_a_shape_that_the_call_cannot_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ts.InputError, match=r"first tensor has the shape \(8, 16\)"):
        ts.plan(net(), batch(SHORT), longest=shape, budget="1GiB", device=DEVICE)


def test_what_has_the_sizes_of_the_first_tensor_becomes_as_large() -> None:
    ids, mask, labels = torch.arange(8).view(2, 4), torch.ones(2, 4), torch.tensor([5, 6])
    (made, other), named = resized((ids, mask), {"labels": labels, "scale": torch.ones(3), "cut": True}, (3, 10))
    assert made.shape == other.shape == (3, 10)
    assert made[2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert named["labels"].tolist() == [5, 6, 5]
    assert named["scale"].shape == (3,)
    assert named["cut"] is True


def test_one_profile_serves_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer when it is measured a second time is planned as the first time."""
    model, slower = net(), 1.0

    def observe(*args: Any, **kwargs: Any) -> Any:
        found = profile_stage(*args, **kwargs)
        cost = replace(found[0], forward_seconds=slower, record_seconds=slower)
        return (cost, *found[1:])

    profile_stage = observing.profile_stage
    monkeypatch.setattr(observing, "profile_stage", observe)
    needed = least_of(LONG, {"home": "device", "device": DEVICE})
    with pytest.raises(ts.BudgetError) as refused:
        ts.plan(model, batch(LONG), budget=needed // 2, device=DEVICE, home="device")
    offered = refused.value.budgets
    assert len(offered) >= 2
    for one in offered:
        slower *= 3
        plan = ts.plan(model, batch(LONG), budget=one.nbytes, device=DEVICE, home="device")
        assert plan.seconds <= one.seconds
    assert ts.plan(net(), batch(LONG), budget="1GiB", device=DEVICE).seconds > plan.seconds


def test_tokens_are_whole_numbers_in_two_dimensions() -> None:
    torch.manual_seed(1)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(16, WIDTH), nn.Sequential(*blocks)).to(DEVICE)
    short, long = (torch.zeros(2, length, dtype=torch.int64, device=DEVICE) for length in (4, 16))
    paces = ts.plan(model, short, longest={"input": long}, budget="1GiB", device=DEVICE).paces
    assert [(pace.size, pace.unit) for pace in paces] == [((2, 4), "tokens"), ((2, 16), "tokens")]
