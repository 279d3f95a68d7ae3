"""`accumulate` gives the bits of plain PyTorch's loop: models, engines, homes, budgets and update modes."""

from pathlib import Path

import pytest
import torch
from accumulating import (
    always_faster,
    check,
    expected,
    least_for_accumulating,
    mean_loss,
    one_by_one,
    prepared,
    said,
    train,
)
from exact import assert_same, seed
from place import DEVICE
from streamable import MODELS, WIDTH, Chained, Dense, Model, dense, numbers
from streaming import gradients_of, options_of
from torch import nn
from wordy import WORDY

import tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig

ONE_BY_ONE = {
    "resnet": "buffers, as BatchNorm does",
    "sequential": "buffers, as BatchNorm does",
    "spectral": "a module has hooks",
    "noisy": "random numbers",
    "tied": "blocks share parameters",
    "tied_autocast": "blocks share parameters",
    "repeated": "blocks share parameters",
    "cached": "objects that it may change",
    "fixed_cache": "objects that it may change",
    "skipping": "uses what a block was given",
    "watched": "a module has hooks",
    "dropping": "calls the blocks in another order",
}
"""Models whose micro-batches cannot go together, and what is said of them."""

TOGETHER = [name for name in MODELS if name not in ONE_BY_ONE]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_where_the_bits_would_differ_they_go_one_by_one_and_it_is_said(name: str, tmp_path: Path) -> None:
    with always_faster():
        order = check(MODELS[name], tmp_path)
    assert "3 micro-batches one after the other: " in order
    assert ONE_BY_ONE[name] in order


@pytest.mark.parametrize(("number", "name"), list(enumerate(TOGETHER)))
def test_together_with_room(number: int, name: str, tmp_path: Path) -> None:
    with always_faster():
        order = check(MODELS[name], tmp_path, home=("disk", "device")[number % 2])
    assert order.startswith("3 micro-batches together, block by block")


@pytest.mark.parametrize(("number", "name"), list(enumerate(TOGETHER)))
def test_together_in_the_least_budget(number: int, name: str, tmp_path: Path) -> None:
    case, update = MODELS[name], ("step", "backward")[number % 2]
    budget = least_for_accumulating(case, options_of("adversarial", tmp_path), update)
    with always_faster():
        order = check(case, tmp_path, engine="adversarial", budget=budget, update=update)
    assert order.startswith("3 micro-batches together, block by block")


@pytest.mark.parametrize("planner", ["periodic", "revolve", "rotor", "offload"])
def test_planners(planner: str, tmp_path: Path) -> None:
    """States are kept, recomputed, and moved to the disk and back."""
    case = MODELS["gpt"]
    budget = least_for_accumulating(case, options_of("adversarial", tmp_path) | {"planner": planner})
    with always_faster():
        order = check(case, tmp_path, engine="adversarial", budget=budget, planner=planner)
    assert order.startswith("3 micro-batches together, block by block")


@pytest.mark.on_cpu
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["gpt", "gpt_autocast", "adapters"])
def test_together_beside_copies_in_streams(name: str, home: str, update: str, tmp_path: Path) -> None:
    budget = least_for_accumulating(MODELS[name], options_of("fake_streams", tmp_path, home), update)
    with always_faster():
        order = check(MODELS[name], tmp_path, engine="fake_streams", home=home, budget=budget, update=update)
    assert order.startswith("3 micro-batches together, block by block")


@pytest.mark.parametrize(("number", "name"), list(enumerate(["untied", "frozen", "direct"])))
def test_embeddings_and_heads_that_come_and_go(number: int, name: str, tmp_path: Path) -> None:
    case, update = WORDY[name], ("step", "backward")[number % 2]
    budget = least_for_accumulating(case, options_of("adversarial", tmp_path), update)
    with always_faster():
        order = check(case, tmp_path, engine="adversarial", budget=budget, update=update)
    assert order.startswith("3 micro-batches together, block by block")


def test_losses_in_chunks(tmp_path: Path) -> None:
    found = []
    for accumulate in (one_by_one, ts.accumulate):
        model = ts.stream(MODELS["gpt"].model(), budget="1 GiB", loss_chunks=3, **options_of("auto", tmp_path))
        with always_faster():
            found.append(train(model, prepared(model), MODELS["gpt"], accumulate))
        order = ts.report(model).accumulation or ""
        ts.unstream(model)
    assert "together" in order
    assert_same(*found)


def test_clipped_gradients(tmp_path: Path) -> None:
    case = MODELS["gpt"]

    def clipped(accumulate):  # type: ignore[no-untyped-def]
        def call(model, given, loss):  # type: ignore[no-untyped-def]
            losses = accumulate(model, given, loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return losses

        return call

    plain = case.model().to(DEVICE)
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), case, clipped(one_by_one))
    model = ts.stream(case.model(), budget="1 GiB", **options_of("auto", tmp_path))
    with always_faster():
        found = train(model, prepared(model), case, clipped(ts.accumulate))
    assert "together" in said(model)
    ts.unstream(model)
    assert_same(wanted, found)


def shorter_each_time() -> Model:
    lengths = iter([8, 5, 2, 7, 8, 3] * 20)

    def tokens() -> tuple[torch.Tensor, ...]:
        length = next(lengths)
        return torch.randint(0, 17, (2, length)), torch.randint(0, 17, (2, length))

    return Model(lambda: GPT(GPTConfig(4, WIDTH, 2, vocabulary=17, context=8, dropout=0.1)), tokens)


def test_micro_batches_of_other_shapes(tmp_path: Path) -> None:
    wanted = expected(shorter_each_time(), steps=5)
    model = ts.stream(shorter_each_time().model(), budget="1 GiB", **options_of("auto", tmp_path))
    with always_faster():
        found = train(model, prepared(model), shorter_each_time(), ts.accumulate, steps=5)
    order = said(model)
    ts.unstream(model)
    assert_same(wanted, found)
    assert "together" in order


class Looking(Chained):
    """Looks at what lies between the blocks, and changes its gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k % 2:
                x.register_hook(lambda gradient: gradient * 1.5)
                assert x.grad_fn is not None
                x.grad_fn.register_prehook(lambda gradients: tuple(g if g is None else g * 1.25 for g in gradients))
        return x


def test_hooks_on_what_blocks_return(tmp_path: Path) -> None:
    with always_faster():
        order = check(Model(lambda: Looking(dense()), numbers(3, WIDTH)), tmp_path)
    assert "together" in order


class Inside(Chained):
    """Enters ``autocast`` itself, as models that were wrapped for it do, so that backward runs outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            found: torch.Tensor = super().forward(x)
        return found.float()


def test_autocast_inside_the_model(tmp_path: Path) -> None:
    case = Model(lambda: Inside(dense(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
    with always_faster():
        order = check(case, tmp_path)
    assert "together" in order


class Twice(Chained):
    """Uses a weight before the blocks, and twice behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.before.weight
        x = super().forward(x)
        return (x @ weight) @ weight.T + weight.sum()


class TwiceBefore(Chained):
    """Uses a weight twice before the blocks, and behind them: a sum of three, in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x @ self.before.weight)
        return x @ self.before.weight


@pytest.mark.parametrize(("kind", "order"), [(Twice, "together, block"), (TwiceBefore, "used several times")])
def test_tied_weights_outside_of_blocks(kind: type[Chained], order: str, tmp_path: Path) -> None:
    case = Model(lambda: kind(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
    with always_faster():
        assert order in check(case, tmp_path, count=4)


def test_gradients_that_are_there_already_are_added_to(tmp_path: Path) -> None:
    case = MODELS["frozen_some"]
    plain, model = case.model().to(DEVICE), ts.stream(case.model(), budget="1 GiB", **options_of("auto", tmp_path))
    found = {}
    for name, one, accumulate in (("plain", plain, one_by_one), ("streamed", model, ts.accumulate)):
        seed(3)
        for _ in range(2):
            with always_faster():
                accumulate(one, [tuple(t.to(DEVICE) for t in case.batch()) for _ in range(2)], mean_loss)
        found[name] = gradients_of(one)
    assert "gradients of an earlier backward are there" in said(model)
    ts.unstream(model)
    assert_same(found["plain"], found["streamed"])


def test_parts_of_blocks_may_be_frozen_from_one_step_to_the_next(tmp_path: Path) -> None:
    case = Model(lambda: Chained([Dense() for _ in range(4)]), numbers(3, WIDTH))
    plain, model = case.model().to(DEVICE), ts.stream(case.model(), budget="1 GiB", **options_of("auto", tmp_path))
    found = {}
    for name, one, accumulate in (("plain", plain, one_by_one), ("streamed", model, ts.accumulate)):
        seed(3)
        for step in range(3):
            one.blocks[step].requires_grad_(False)
            one.zero_grad()
            with always_faster():
                accumulate(one, [tuple(t.to(DEVICE) for t in case.batch()) for _ in range(3)], mean_loss)
            found[name] = found.get(name, {}) | {f"{step} {n}": g for n, g in gradients_of(one).items()}
    assert "together" in said(model)
    ts.unstream(model)
    assert_same(found["plain"], found["streamed"])
