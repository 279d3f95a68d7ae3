"""What of stretches is kept from the first sweep, where that saves much that is long to make; what runs again."""

import random
from collections.abc import Callable
from itertools import pairwise, zip_longest
from typing import Any

import pytest
import torch
from side_by_side import compare, fix_seconds
from test_program_record import Products
from torch.nn import functional

from tapestream.executor.program.replay.needed import RUN, SAVE, SKIP, Needed
from tapestream.frontends.program import candidates, holds
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.holds import NOTHING, Holding, Holds
from tapestream.frontends.program.program import Program
from tapestream.ir import Action, Backward, Forward, Phase, PhaseKind, Record
from tapestream.storage.meter import track_memory

WIDTH, ROWS, BLOCKS = 32, 64, 16
_SECONDS = {"linear": 10.0, "gelu": 2.0, "dropout": 2.0}
generator = torch.Generator().manual_seed(0)
UP = [torch.randn(4 * WIDTH, WIDTH, generator=generator).div(8).requires_grad_() for _ in range(BLOCKS)]
DOWN = [torch.randn(WIDTH, 4 * WIDTH, generator=generator).div(16).requires_grad_() for _ in range(BLOCKS)]


def network(x: torch.Tensor) -> torch.Tensor:
    for up, down in zip(UP, DOWN, strict=True):
        x = functional.dropout(x + functional.linear(functional.gelu(functional.linear(x, up)), down), 0.1)
    return x


@pytest.fixture(autouse=True)
def seconds_that_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seconds(monkeypatch, _SECONDS)


def plain_network(x: torch.Tensor) -> torch.Tensor:
    for up, down in zip(UP, DOWN, strict=True):
        x = x + functional.linear(functional.gelu(functional.linear(x, up)), down)
    return x


def tape_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    with track_memory() as meter:
        y = function(x)
    assert y.requires_grad
    return meter.end_nbytes


def products_again(run: Program, x: torch.Tensor, budget: int) -> int:
    """Products that backward of one call makes again. The peak stays within the budget, gradients being outside."""
    for weight in (*UP, *DOWN):
        weight.grad = torch.zeros_like(weight)
    with track_memory() as meter, Products() as products:
        run(x).sum().backward()
    assert meter.peak_nbytes <= 1.05 * budget + 2 * UP[0].nbytes + 2 * x.nbytes
    for weight in (*UP, *DOWN):
        weight.grad = None
    return products.count - 2 * BLOCKS - (4 * BLOCKS - 1)  # two reverse one; the first gives no gradient of x


def products_planned(run: Program, holding: Holding, x: torch.Tensor) -> int:
    """The same by the plan of its last call on ``x``, with this held."""
    assert run._last is not None
    assert run._last.reversal is not None
    assert run._replays is not None
    y = run(x)
    replays = run._replays()
    assert replays is not None
    record, cuts, actions, found = replays.record, run._last.cuts, run._last.reversal.backward, 0
    for action, following in zip_longest(actions, actions[1:]):
        if isinstance(action, Forward):
            first, end = cuts[action.start], cuts[action.stop]
        elif isinstance(action, Record):
            first, end = cuts[action.stage], cuts[action.stage + 1]
        else:
            continue
        saves = isinstance(action, Record) and isinstance(following, Backward)
        todo = Needed(record).of(first, end, *holding.at(first)) if saves else bytes([RUN]) * (end - first)
        names = [record.pattern(k).function.__name__ for k in range(first, end)]
        found += sum(what == RUN and name == "linear" for what, name in zip(todo, names, strict=True))
    assert y.requires_grad
    return found


def sweep_of(run: Program) -> list[Action]:
    assert run.plan is not None
    actions = list(run.plan.schedule)
    return actions[: actions.index(Phase(PhaseKind.BACKWARD))]


def test_what_a_dropout_saves_is_kept_and_the_product_before_it_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(ROWS, WIDTH)
    budget = 2 * tape_of(network, x) // 5
    run = compare(network, [*UP, *DOWN], lambda: (x,), budget, calls=4, planner="auto")
    grown = products_again(run, x, budget)
    monkeypatch.setattr(candidates, "_TAPERS", ())  # stretches of about one length
    run = compare(network, [*UP, *DOWN], lambda: (x,), budget, calls=4, planner="auto")
    tails = [a for a, b in pairwise(sweep_of(run)) if isinstance(a, Record) and not isinstance(b, Record)]
    assert len(tails) >= 3
    assert run.report is not None
    assert run.report.planned
    assert 0 < products_again(run, x, budget) <= 1.3 * BLOCKS
    assert 0 < grown < products_again(run, x, budget)


def test_products_are_kept_and_what_is_cheap_runs_again() -> None:
    x = torch.ones(ROWS, WIDTH)
    budget = tape_of(plain_network, x) // 2
    run = compare(plain_network, [*UP, *DOWN], lambda: (x,), budget, calls=4, planner="auto")
    assert run._last is not None
    assert len(run._last.holding.values) >= 3
    assert run.report is not None
    assert run.report.reruns >= 3
    assert products_again(run, x, budget) == products_planned(run, run._last.holding, x)
    assert products_planned(run, run._last.holding, x) <= products_planned(run, NOTHING, x) - 3
    explained = run.explain(x)
    assert run.plan is not None
    assert explained.peak_nbytes == run.plan.peak_nbytes
    assert sum(row.fate == "restart checkpoint" for row in explained.rows) >= len(run._last.holding.values)


def test_of_a_stretch_that_runs_again_nothing_is_computed_that_nothing_needs() -> None:
    kept = torch.ones(ROWS, WIDTH)

    def program(x: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(x, UP[0])  # 0
        bent = functional.gelu(inner)  # 1
        out = functional.linear(bent, DOWN[0])  # 2
        out = functional.dropout(out, 0.1)  # 3: draws
        seen = out.detach()  # 4
        torch.add(seen, 1.0, out=kept)  # 5: writes
        return (out * kept).sum()  # 6, 7

    run = Program(program, budget="1GiB")
    loss = run(torch.ones(ROWS, WIDTH))
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record, needed = replays.record, Needed(replays.record)
    assert len(record) == 8
    assert list(record.drawn) == [3]
    assert list(needed.of(0, 8, ())) == [RUN, RUN, RUN, RUN, RUN, RUN, SAVE, SKIP]
    assert list(needed.of(0, 3, ())) == [RUN, RUN, SAVE]
    inner, bent = record.results_of(0)[0], record.results_of(1)[0]
    assert list(needed.of(0, 3, {inner})) == [SAVE, RUN, SAVE]
    assert list(needed.of(0, 3, {inner, bent})) == [SAVE, SAVE, SAVE]
    assert list(needed.of(4, 8, ())) == [RUN, RUN, SAVE, SKIP]
    loss.backward()


def borders_of(seed: int) -> tuple[Borders, random.Random]:
    """Of a random program, and what its pieces are chosen by."""
    choose = random.Random(seed)

    def program(x: torch.Tensor) -> torch.Tensor:
        values, seen = [x], torch.zeros(ROWS, WIDTH)
        for k in range(40):
            one, other = choose.choice(values[-4:]), choose.choice(values)
            match choose.randrange(8):
                case 0 | 1:
                    values.append(functional.gelu(functional.linear(one, UP[k % BLOCKS])) @ UP[0])
                case 2:
                    values.append(functional.layer_norm(one, (WIDTH,)) + other)
                case 3:
                    values.append(functional.dropout(one, 0.1) * other)
                case 4:
                    values.append(one.reshape(WIDTH, ROWS).t().tanh())
                case 5:
                    values.append(functional.scaled_dot_product_attention(one, other, one))
                case 6:
                    torch.add(one.detach(), 1.0, out=seen)
                    values.append(other + seen)
                case _:
                    values.append(torch.cat([one[:2], other[2:]]).mul(2).add_(1))
        return sum(values).sum()  # type: ignore[union-attr, return-value]

    run, found = Program(program, budget="1GiB"), list[Borders]()
    made = run._borders
    run._borders = lambda sweep: found.append(made(sweep)) or found[-1]  # type: ignore[assignment, func-returns-value]
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    run(x).backward()
    return found[-1], choose


@pytest.mark.thinned(9)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_step_by_step_saves_as_much_as_when_all_is_asked_again(seed: int) -> None:
    """Pieces of a stretch in any order: seconds by counts of who needs a value are those of a whole look."""
    borders, choose = borders_of(seed)
    n = len(borders.record)
    for first, end in ((0, n), (0, n // 2), (n // 3, n), (n // 4, n // 2)):
        pieces, again = borders.may_be_held(first, end), borders.asked(first, end)
        choose.shuffle(pieces)
        values, saves, whole = frozenset[int](), frozenset[int](), borders.needed_seconds(first, end)
        for piece in pieces:
            for other in choose.sample(pieces, min(5, len(pieces))):
                left = borders.needed_seconds(first, end, values | other.values, saves | other.operations)
                assert again.saved_by(other.values, other.operations) == pytest.approx(whole - left)
            values, saves = values | piece.values, saves | piece.operations
            saved = again.saved_by(piece.values, piece.operations, there=True)
            left = borders.needed_seconds(first, end, values, saves)
            assert saved == pytest.approx(whole - left)
            whole = left


@pytest.mark.thinned(9)
@pytest.mark.parametrize("seed", range(20))
def test_every_piece_that_is_held_saves_seconds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from each other, too: two pieces between which all runs again for either save it once."""
    monkeypatch.setattr(holds, "_NEAR", 0)
    borders = borders_of(seed)[0]
    cuts = [0, len(borders.record) // 2, len(borders.record)]
    for stage in (0, 1):
        found = Holds(cuts, borders)._of(stage, shared=False)
        assert all(one.seconds > 0 for one in found)
        values, saves, whole = frozenset[int](), frozenset[int](), borders.needed_seconds(*cuts[stage : stage + 2])
        for one in found:
            values, saves = values | one.piece.values, saves | one.piece.operations
            left = borders.needed_seconds(*cuts[stage : stage + 2], values, saves)
            assert one.seconds == pytest.approx(whole - left)
            whole = left


@pytest.mark.full
def test_stretches_that_grow_toward_the_beginning_run_less_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for later ones is gone when early ones are reversed: blocks of which few results are long to make
    and small, as bottlenecks have them."""
    narrow, wide = 8, 4 * WIDTH
    into, inner, out = (
        [torch.randn(b, a, generator=generator).div(a**0.5).requires_grad_() for _ in range(4 * BLOCKS)]
        for a, b in ((wide, narrow), (narrow, narrow), (narrow, wide))
    )

    def bottlenecks(x: torch.Tensor) -> torch.Tensor:
        for a, b, c in zip(into, inner, out, strict=True):
            y = functional.gelu(functional.linear(functional.gelu(functional.linear(x, a)), b))
            x = functional.gelu(x + functional.linear(y, c))
        return x

    x = torch.linspace(-1, 1, ROWS * wide).view(ROWS, wide)
    budget, own = tape_of(bottlenecks, x) // 4, candidates._TAPERS

    def planned(tapers: Any) -> int:
        monkeypatch.setattr(candidates, "_TAPERS", tapers)
        run = compare(bottlenecks, [*into, *inner, *out], lambda: (x,), budget, calls=4, planner="auto")
        assert run._last is not None
        return products_planned(run, run._last.holding, x)

    fix_seconds(monkeypatch, {"linear": 1.0})
    assert 0 < planned(own) < planned(())
