"""`Program.explain`: rows are what plain autograd saves, with its lines; nothing is touched by asking."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from side_by_side import least, outcome
from torch import nn
from torch.nn import functional

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.program.explanation import Explanation
from tapestream.frontends.program.plans import Prepared
from tapestream.frontends.program.program import Program

LARGE = 1 << 30


class Net(nn.Module):
    def __init__(self, blocks: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), 0.1) * (1 + 0 * random.random())
        return x.square().mean()


def image() -> torch.Tensor:
    return torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))


def tight(net: Net) -> Program:
    """A third of the way from the least budget to one that holds everything."""
    lowest = least(net, [], lambda: (image(),), 0)
    most = Program(net, budget=LARGE).explain(image()).peak_nbytes
    return Program(net, budget=lowest + (most - lowest) // 3)


def test_rows_are_what_autograd_saves_with_its_lines() -> None:
    w = torch.randn(8, 8, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        line.append(sys._getframe().f_lineno - 1)
        return torch.relu(y).view(4, 16).exp().sum()

    line: list[int] = []
    found = Program(program, budget=LARGE).explain(torch.randn(8, 8))
    assert [(row.operation, row.shape, row.dtype, row.nbytes) for row in found.rows] == [
        ("relu", (8, 8), "float32", 256), ("exp", (4, 16), "float32", 256),
    ]  # fmt: skip
    assert {row.line for row in found.rows} == {line[0] + 2}
    assert all(Path(row.file) == Path(__file__) for row in found.rows)
    assert found.operations == 5
    assert found.sums() == {"kept": (2, 512), "restart checkpoint": (0, 0), "recomputed": (0, 0)}
    assert all(row.times == 0 and row.seconds > 0 for row in found.rows)
    assert found.live_nbytes == found.stored_nbytes


def test_what_an_operation_saves_inside_is_a_row_too() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    found = Program(lambda x: functional.dropout(x, 0.5).sum(), budget=LARGE).explain(x)
    assert {(row.operation, row.shape) for row in found.rows} == {("dropout", (64, 64))}


def test_modules_of_torch_alone_have_lines_of_torch() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    rows = Program(net, budget=LARGE).explain(torch.randn(2, 8)).rows
    assert {Path(row.file).name for row in rows} == {"activation.py"}


def test_fates_are_those_of_the_plan_that_calls_follow() -> None:
    net = Net()
    program = tight(net)
    before = program.explain(image())
    sums = before.sums()
    assert sums["kept"][0] > 0
    assert sums["recomputed"][0] > 0
    assert before.peak_nbytes <= before.budget_nbytes
    assert max(before.live_nbytes) <= before.peak_nbytes < max(before.stored_nbytes)
    assert {row.times > 0 for row in before.rows if row.fate == "recomputed"} == {True}
    for _ in range(4):  # the last two follow the same plan
        outcome(program, [], lambda: (image(),))
    assert program.plan is not None
    assert program.report is not None
    after = program.explain(image())
    assert after.peak_nbytes == program.plan.peak_nbytes
    assert len(after.cuts) - 1 == program.report.stages
    assert len(after.restarts) + 1 == program.report.kept


def test_restart_checkpoints_are_named() -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(x @ w)
        return x.sum()

    found = Program(program, budget="400KiB", planner="revolve").explain(torch.randn(64, 64))
    assert len(found.restarts) > 5
    assert 0 < found.sums()["restart checkpoint"][0] <= len(found.restarts)
    assert max(row.times for row in found.rows) > 1
    assert any(row.words == "recomputed twice" for row in found.rows)


def test_asking_changes_nothing() -> None:
    net = Net()
    program, plain = tight(net), Net()
    numpy.random.seed(0)
    for seed in range(2):
        outcome(program, [], lambda: (image(),), seed)
        outcome(plain, [], lambda: (image(),), seed)
    loss = program(image())  # its backward is still to come
    state = [(t.clone(), t._version) for t in (*net.parameters(), *net.buffers())]
    gradients = [p.grad for p in net.parameters()]
    copies = [None if g is None else g.clone() for g in gradients]
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
    kept, plan, report, kinds = dict(program._prepared), program.plan, program.report, len(program._kinds.numbers)
    program.explain(image())
    program.explain(image()[:1])
    for t, (bits, version) in zip((*net.parameters(), *net.buffers()), state, strict=True):
        assert torch.equal(t, bits)
        assert t._version == version
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert all(g is None or torch.equal(g, c) for g, c in zip(gradients, copies, strict=True) if c is not None)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert bool((numpy.random.get_state(legacy=False)["state"]["key"] == generators[2]["state"]["key"]).all())  # type: ignore[call-overload]
    assert (program._prepared, program.plan, program.report) == (kept, plan, report)
    assert len(program._kinds.numbers) == kinds
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_calls_after_asking_have_the_bits_of_plain_pytorch() -> None:
    net, plain = Net(), Net()
    program = tight(net)
    net.load_state_dict(Net().state_dict())
    for seed in range(3):
        program.explain(image())
        wanted = outcome(plain, list(plain.parameters()), lambda: (image(),), seed)
        found = outcome(program, list(net.parameters()), lambda: (image(),), seed)
        assert torch.equal(found[0][0], wanted[0][0])
        assert all(torch.equal(a, b) for a, b in zip(found[2], wanted[2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(net.buffers(), plain.buffers(), strict=True))


def test_it_is_text_and_a_picture(tmp_path: Path) -> None:
    found = tight(Net()).explain(image())
    text = str(found)
    assert "kept in the first run" in text
    assert "lighter ones" in text
    assert "test_program_explain.py:" in text
    assert isinstance(found, Explanation)
    found.plot(tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"cannot draw into .*live\.nothing"):
        found.plot(tmp_path / "live.nothing")


def test_many_stretches_leave_the_curves_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("tapestream.frontends.program.explanation.saved", lambda figure, _: figures.append(figure))
    found = tight(Net()).explain(image())
    for number in (60, 255):
        replace(found, cuts=tuple(range(number))).plot("live.png")
    for figure, height in zip(figures, (1.0, 0.1), strict=True):
        (axis,) = figure.axes
        ((_, (_, top)), *_) = axis.collections[-1].get_segments()
        assert top <= height * axis.get_ylim()[1]
        assert (top < 0.1 * axis.get_ylim()[1]) == (height < 1)


def fails(x: torch.Tensor) -> torch.Tensor:
    norm(x)
    torch.randn(2)
    raise ZeroDivisionError("half way")


norm = nn.BatchNorm2d(4)


def test_what_the_function_raises_is_raised_and_nothing_is_touched() -> None:
    before, generator = norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError, match="half way"):
        Program(fails, budget=LARGE).explain(image())
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
    assert norm.num_batches_tracked.item() == 0  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * 2, "saves nothing for backward"),
        (lambda x: None, "returned NoneType"),
        (lambda x: {"loss": float(x.sum())}, "returned dict"),
    ],
)
def test_what_cannot_be_explained_is_refused(function: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Program(function, budget=LARGE).explain(image())


def test_gradients_switched_off_and_budgets_too_small() -> None:
    program = Program(Net(), budget=1000)
    with torch.no_grad(), pytest.raises(InputError, match="switched off"):
        program.explain(image())
    with pytest.raises(BudgetError, match="least found to work") as found:
        program.explain(image())
    assert (found.value.least_nbytes or 0) > 1000


def test_where_no_plan_is_followed_it_says_what_calls_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart checkpoints are then those that the first sweep has kept as it went on."""

    def unplanned(borders: Any, shape: Any, *rest: Any) -> Prepared:
        return Prepared.unplanned(shape)

    for module in ("program", "explain"):
        monkeypatch.setattr(f"tapestream.frontends.program.{module}.prepare", unplanned)
    w = torch.randn(64, 64, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(x @ w)
        return x.sum()

    run = Program(program, budget="400KiB")
    for _ in range(2):
        run(torch.randn(64, 64)).backward()
    report = run.report
    assert report is not None
    assert not report.planned
    found = run.explain(torch.randn(64, 64))
    assert len(found.restarts) + 1 == report.kept > 1
    assert found.peak_nbytes <= found.budget_nbytes
