"""`accumulate`: what it refuses, which order it chooses, what it leaves behind where micro-batches cannot go together,
and how much memory it takes."""

import contextlib
import gc
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accumulating import always_faster, least_for_accumulating, mean_loss, one_by_one, prepared, said
from exact import assert_same, seed
from place import DEVICE
from streamable import WIDTH, Chained, Dense, Model, dense, numbers
from streaming import DIRECT, D, H, K, gradients_of, options_of
from torch import nn

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.models.gpt import GPT, GPTConfig
from tapestream.storage.meter import track_memory

CASE = Model(lambda: Chained(dense()), numbers(3, WIDTH))
SMALL = 8 * 1024  # counters, scalars and the like
LANES = ((D, K), (K, D)) if DEVICE == "cpu" else ((D, H), (H, K), (K, H), (H, D))
SLOW = ts.Machine(links={lane: ts.Link(1e5) for lane in LANES})


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    found = ts.stream(CASE.model(), budget="1 GiB", **options_of("auto", tmp_path))
    yield found
    ts.unstream(found)


def given(count: int = 3, case: Model = CASE) -> list[Any]:
    return [tuple(t.to(DEVICE) for t in case.batch()) for _ in range(count)]


def no_gradients(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("micro_batches", "loss", "message"),
    [
        ([], mean_loss, "there are no micro-batches; give at least one, or skip this step"),
        (torch.zeros(4, WIDTH), mean_loss, "a Tensor, which is one batch; give a list of micro-batches"),
        ({"x": torch.zeros(4, WIDTH)}, mean_loss, "a dict, which is one batch; give a list of micro-batches"),
        ([torch.zeros(4, WIDTH)] * 2, torch.zeros(2), "loss is a Tensor; give a function loss(output"),
        ([torch.zeros(4, WIDTH)] * 2, lambda out, _: out, "gave a tensor of shape (4, 16); return a scalar"),
        ([torch.zeros(4, WIDTH)] * 2, lambda out, _: out.sum().item(), "gave a float; return the loss itself"),
        ([torch.zeros(4, WIDTH)] * 2, lambda out, _: out.sum().detach(), "gave a number without a gradient"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(model: nn.Module, micro_batches: Any, loss: Any, message: str) -> None:
    micro_batches = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), micro_batches)
    for faster in (False, True):
        with always_faster() if faster else torch.enable_grad(), pytest.raises(ts.InputError, match=re.escape(message)):
            ts.accumulate(model, micro_batches, loss)
        assert no_gradients(model)
    ts.accumulate(model, given(), mean_loss)  # as if nothing had been


def test_a_model_that_is_not_streamed_and_no_grad_are_refused(model: nn.Module) -> None:
    with pytest.raises(ts.InputError, match="stream"):
        ts.accumulate(CASE.model(), given(), mean_loss)
    with torch.no_grad(), pytest.raises(ts.InputError, match=re.escape("inside no_grad()")):
        ts.accumulate(model, given(), mean_loss)


def test_one_micro_batch_is_a_call(model: nn.Module) -> None:
    (loss,) = ts.accumulate(model, given(1), mean_loss)
    assert not loss.requires_grad
    assert not no_gradients(model)
    assert said(model) == "1 micro-batches one after the other: there is one"


def test_no_micro_batches_are_reported_where_there_were_none(model: nn.Module) -> None:
    mean_loss(model(*given(1)[0]), None).backward()
    assert ts.report(model).accumulation is None


def test_updates_within_backward_need_all_at_once(tmp_path: Path) -> None:
    norms = Model(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))),
                  numbers(4, 8))  # fmt: skip
    model = ts.stream(norms.model(), budget="1 GiB", **options_of("auto", tmp_path))
    prepared(model, "backward")
    with pytest.raises(ts.InputError, match=r"BatchNorm.*make the optimizer with update='step'"):
        ts.accumulate(model, given(2, norms), mean_loss)
    ts.unstream(model)
    model = ts.stream(CASE.model(), budget="1 GiB", **options_of("auto", tmp_path))
    optimizer = prepared(model, "backward")
    ts.accumulate(model, given(2), mean_loss)
    optimizer.step()
    ts.frontends.module.stream.handle_of(model).budget = ts.Budget(20_000)
    ts.frontends.module.stream.handle_of(model).replan()
    with pytest.raises(ts.BudgetError, match="all 400 micro-batches pass a block before its update"):
        ts.accumulate(model, given(400), mean_loss)
    ts.unstream(model)


# -- which order ------------------------------------------------------------------------------------------------------


def test_they_go_together_where_weights_take_longer_to_come_than_blocks_to_run_again(tmp_path: Path) -> None:
    options = options_of("auto", tmp_path) | {"machine": SLOW}
    budget = least_for_accumulating(CASE, options)
    model = ts.stream(CASE.model(), budget=budget, **options)
    ts.accumulate(model, given(), mean_loss)
    report = ts.report(model)
    ts.unstream(model)
    assert "  accumulated  3 micro-batches together, block by block (planned: " in str(report)
    moved = report.bytes_moved[LANES[-1]]
    parameters = sum(block.parameters_nbytes for block in report.plan.profile.blocks)
    assert moved <= 3 * parameters  # twice, and what profiling has read; one by one it would be six times


def test_where_nothing_moves_they_go_one_by_one(tmp_path: Path) -> None:
    model = ts.stream(CASE.model(), budget="1 GiB", **options_of("auto", tmp_path, "device"))
    ts.accumulate(model, given(), mean_loss)
    assert "one after the other: that is faster (planned: " in said(model)
    ts.unstream(model)


def test_states_that_do_not_fit_together_go_one_by_one(tmp_path: Path) -> None:
    options = options_of("auto", tmp_path) | {"machine": SLOW}
    budget = least_for_accumulating(CASE, options)
    model = ts.stream(CASE.model(), budget=budget - 1, **options)
    ts.accumulate(model, given(), mean_loss)
    assert said(model) == f"3 micro-batches one after the other: together they need {budget} bytes"
    ts.unstream(model)


# -- what cannot go together leaves no trace --------------------------------------------------------------------------


class Counting(Chained):
    """Counts its calls, and computes with the number."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Drawing(Chained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Jumping(Chained):
    """Leaves out a block every second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            if k != 3 or float(x.detach().sum()) > 0:
                x = block(x)
        return x


class Remembering(Chained):
    """Begins with what the call before has left in an attribute."""

    memory: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x + self.memory if isinstance(self.memory, torch.Tensor) else x)
        self.memory = x.detach()
        return x


class RememberingLists(Chained):
    memory: tuple[list[torch.Tensor], ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x + sum(m.mean() for one in self.memory for m in one))
        self.memory = ([x.detach()],)
        return x


class Appending(Chained):
    """Computes with how long a list of its own is."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.memory: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * (1 + len(self.memory))
        self.memory.append(1.0)
        return x


@pytest.mark.parametrize("kind", [Counting, Drawing, Jumping, Remembering, RememberingLists, Appending])
def test_a_try_in_vain_changes_nothing(kind: type[Chained], tmp_path: Path) -> None:
    case = Model(lambda: kind(dense()), numbers(3, WIDTH))
    plain, model = case.model().to(DEVICE), ts.stream(case.model(), budget="1 GiB", **options_of("auto", tmp_path))
    found = {}
    mean_loss(model(*given(1, case)[0]), None)  # which profiles: that call may leave something behind
    for name, one, accumulate in (("plain", plain, one_by_one), ("streamed", model, ts.accumulate)):
        seed(3)
        one.memory, one.calls = [], 0
        seen = list[float]()

        def noted(output: Any, micro_batch: Any, seen: list[float] = seen) -> torch.Tensor:
            loss = mean_loss(output, micro_batch)
            seen.append(loss.item())
            return loss

        for step in range(4):
            with always_faster():
                losses = accumulate(one, given(3, case), noted)
            found[name] = found.get(name, {}) | {f"{step}.{k}": loss for k, loss in enumerate(losses)}
            found[name] |= {f"{step} {n}": gradient for n, gradient in gradients_of(one).items()}
            one.zero_grad()
        found[name]["python"] = torch.tensor([random.random(), *seen])
        found[name]["torch"] = torch.get_rng_state()
    assert "one after the other" in said(model)
    ts.unstream(model)
    assert_same(found["plain"], found["streamed"])


class Marking(Chained):
    """Writes into what it is given, once it is told to."""

    marks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.marks:
            x[0] += 1
            random.random()
        return super().forward(x)


def test_what_cannot_begin_again_is_refused(tmp_path: Path) -> None:
    model = ts.stream(Marking(dense()).to(DEVICE), budget="1 GiB", **options_of("auto", tmp_path))
    with always_faster():
        ts.accumulate(model, given(), mean_loss)
        assert "together" in said(model)
        model.zero_grad()
        model.marks = True
        with pytest.raises(ts.InputError, match="cannot begin again: the forward has written into"):
            ts.accumulate(model, given(), mean_loss)
    assert no_gradients(model)
    model.marks = False
    with always_faster():
        ts.accumulate(model, given(), mean_loss)
    ts.unstream(model)


class Failed(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "block", "loss", "backward"])
def test_an_exception_of_the_user_s_code_leaves_a_model_that_works(where: str, tmp_path: Path) -> None:
    class Failing(Dense):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails and where == "block":
                raise Failed
            x = super().forward(x)
            if self.fails and where == "backward" and x.requires_grad:
                x.register_hook(fail)
            return x

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise Failed

    class Around(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.blocks[2].fails and where == "forward":
                raise Failed
            return x

    def loss(output: torch.Tensor, micro_batch: Any) -> torch.Tensor:
        if model.blocks[2].fails and where == "loss":
            raise Failed
        return mean_loss(output, micro_batch)

    torch.manual_seed(0)
    case = Model(lambda: Around([Failing() for _ in range(5)]), numbers(3, WIDTH))
    plain, model = case.model().to(DEVICE), ts.stream(case.model(), budget="1 GiB", **options_of("auto", tmp_path))
    batches = given(3, case)
    with always_faster():
        ts.accumulate(model, batches, loss)
        model.zero_grad()
        model.blocks[2].fails = True
        with pytest.raises(Failed):
            ts.accumulate(model, batches, loss)
        assert no_gradients(model)
        model.blocks[2].fails = False
        ts.accumulate(model, batches, loss)
    assert "together" in said(model)
    one_by_one(plain, batches, mean_loss)
    found = gradients_of(model)
    ts.unstream(model)
    assert_same(gradients_of(plain), found)


# -- memory -----------------------------------------------------------------------------------------------------------


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (2, 64)), torch.randint(0, 256, (2, 64))


@pytest.mark.on_cpu
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_all_of_them_are_within_the_budget(dropout: float, update: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = Model(lambda: GPT(GPTConfig(4, 64, 2, vocabulary=256, context=64, dropout=dropout)), tokens)
    options = options_of("auto", tmp_path) | {"machine": DIRECT}
    budget = least_for_accumulating(case, options, update, count=8)
    model = ts.stream(case.model(), budget=budget, **options)
    optimizer = prepared(model, update)
    for step in range(4):
        gc.collect()
        held = held_nbytes(model)
        with always_faster(), track_memory() if step > 1 else contextlib.nullcontext() as meter:
            ts.accumulate(model, given(8, case), mean_loss)
            optimizer.step()
            optimizer.zero_grad()
    # What a step frees is seen only if the step that made it was measured too.
    assert meter is not None
    assert 0.7 * budget <= held + meter.peak_nbytes <= budget + SMALL
    assert "8 micro-batches together" in said(model)
    ts.unstream(model)
