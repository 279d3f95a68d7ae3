"""What blocks may be given, identity, copies, undoing, calls without gradients."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, copy_of, seed
from pairs import CASE, Pair, batch, both, sgd
from place import DEVICE
from streamable import WIDTH, Chained, Dense, Model, Positioned, dense, gpt, numbers
from streaming import ENGINES, everything, gradients_of, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.models.gpt import Block
from tapestream.storage.meter import track_memory

# ----------------------------------------------------------------------------------------- what blocks may be given


class Closing(Dense):
    """A block that also uses a tensor that is none of its parameters, once or more often."""

    def __init__(self, held: list[torch.Tensor], times: int = 1) -> None:
        super().__init__()
        self.held, self.times = held, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = super().forward(x) * self.held[0]
        return x


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_held_otherwise_gets_its_gradient(engine: str, tmp_path: Path) -> None:
    def gradients(run: Callable[[nn.Module], nn.Module]) -> dict[str, torch.Tensor | None]:
        seed(3)
        held = [nn.Parameter(torch.ones(WIDTH, device=DEVICE))]
        model = run(Chained([Closing(held) for _ in range(3)]))
        for _ in range(2):
            model(batch()).square().mean().backward()
        return {"held": copy_of(held[0].grad)} | gradients_of(model)

    options = options_of(engine, tmp_path, "host" if engine == "fake_streams" else "disk")
    plain = gradients(lambda model: model.to(DEVICE))
    assert_same(plain, gradients(lambda model: ts.stream(model, budget="1 MiB", **options)))


def test_a_tensor_held_otherwise_and_used_twice_in_a_block_is_refused() -> None:
    model = ts.stream(Chained([Closing([nn.Parameter(torch.ones(WIDTH))], times=2) for _ in range(3)]), device="cpu")
    with pytest.raises(
        InputError, match=r"block 0 \(Closing\) uses a tensor of shape \(16,\).*make it a parameter of the block"
    ):
        model(batch())
    ts.unstream(model)


def test_a_parameter_of_another_block_is_refused() -> None:
    held: list[torch.Tensor] = []
    model = Chained([Closing(held) for _ in range(3)])
    held.append(next(p for p in model.blocks[1].parameters() if p.shape == (WIDTH,)))
    model = ts.stream(model, device="cpu")
    with pytest.raises(InputError, match="is a parameter of another block; make it a parameter of the block"):
        model(batch())
    ts.unstream(model)


def test_an_output_changed_in_place_between_blocks_is_right_or_refused(tmp_path: Path) -> None:
    blocks = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    case = Model(lambda: Positioned(copy.deepcopy(blocks), in_place=True), numbers(3, WIDTH))
    theirs = case.model()
    with streamed(case, "1 MiB", **options_of("adversarial", tmp_path)) as ours:
        pair = theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)
        try:
            both(pair, lambda model, _: loss_at(model, case).backward())
        except (InputError, GradientError, RuntimeError) as error:
            assert "in-place" in str(error) or "in place" in str(error)  # noqa: PT017


def test_one_block_in_two_chains_is_refused_under_autocast(tmp_path: Path) -> None:
    class Twice(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            x = (x * 2).add_(1)  # which a recompute cannot do
            for block in self.blocks:
                x = block(x)
            return x

    case = Model(lambda: Twice(dense(3)), numbers(3, WIDTH))
    with (
        streamed(case, "1 MiB", **options_of("auto", tmp_path)) as model,
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=r"block \d.*more than one chain under autocast"),
    ):
        model(batch())


class Turning(Chained):
    """Runs its blocks forwards or backwards, the first one twice then."""

    forwards = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.forwards else (*reversed(self.blocks), self.blocks[0]):
            x = block(x)
        return x


@pytest.mark.parametrize("engine", ["auto", "adversarial"])
def test_another_order_of_blocks(engine: str, tmp_path: Path) -> None:
    case = Model(lambda: Turning(dense(3)), numbers(3, WIDTH))
    plain = case.model()
    with streamed(case, "1 MiB", **options_of(engine, tmp_path)) as model:
        for forwards in (True, False, True):
            x = batch()
            for one in (plain, model):
                one.forwards = forwards
                one(x).sum().backward()
            assert_same(gradients_of(plain), gradients_of(model))


# ------------------------------------------------------------------------------------------------------- identity


def test_identity_and_undoing(setting: dict[str, Any]) -> None:
    model = CASE.model()
    before = {name: (id(p), type(m)) for name, m in model.named_modules() for p in m.parameters()}
    parameters, state, classes = list(model.parameters()), everything(model), [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    assert ts.stream(model, **setting) is model
    assert isinstance(model.blocks[0], Dense)
    assert isinstance(model, Chained)
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(state, everything(model))
    with pytest.raises(InputError, match=r"streamed already; call tapestream\.unstream"):
        ts.stream(model, **setting)
    optimizer = sgd(model)
    loss_at(model, CASE).backward()
    optimizer.step()
    trained, gradients = everything(model), gradients_of(model)
    assert ts.unstream(model) is model
    assert not any(Path(setting["folder"]).iterdir())
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert before == {name: (id(p), type(m)) for name, m in model.named_modules() for p in m.parameters()}
    assert_same(trained, everything(model))
    assert_same(gradients, gradients_of(model))
    with pytest.raises(InputError, match=r"not streamed; call tapestream\.stream"):
        ts.unstream(model)
    copy.deepcopy(model)(batch()).sum().backward()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())])
@pytest.mark.parametrize("part", ["model", "block"])
def test_copies_and_pickles_are_refused(pair: Pair, way: Callable[[Any], Any], part: str) -> None:
    with pytest.raises(InputError, match=r"streamed.*cannot be (copied|pickled).*state_dict\(\)"):
        way(pair[1] if part == "model" else pair[1].blocks[1])


def test_a_block_alone(pair: Pair) -> None:
    """It is a call of its own."""
    ours, x = pair[1], batch()
    for model in pair[:2]:
        model.blocks[2](x).square().sum().backward()
    assert_same(gradients_of(pair[0]), gradients_of(ours))
    with torch.no_grad():
        assert torch.equal(ours.blocks[2](x), pair[0].blocks[2](x))


def test_blocks_made_on_meta_become_real_one_by_one(tmp_path: Path) -> None:
    with torch.device("meta"):
        hollow = gpt()
    real = gpt()
    ts.stream(hollow, device="cpu", folder=tmp_path)
    assert isinstance(hollow.blocks[1], Block)
    assert_same(everything(real), everything(hollow))
    ts.unstream(hollow)
    assert_same(everything(real), everything(hollow))


def test_wrapping_takes_one_block_beyond_the_rest(tmp_path: Path) -> None:
    class Wide(Dense):
        def __init__(self) -> None:
            super().__init__(256)

        def initialize(self) -> None:
            for p in self.parameters():
                nn.init.normal_(p)

    with torch.device("meta"):
        hollow = Chained([Wide() for _ in range(12)])
    with track_memory() as meter:
        ts.stream(hollow, device="cpu", folder=tmp_path)
    block = sum(p.nbytes for p in hollow.blocks[0].parameters())
    assert block <= meter.peak_nbytes <= 2.5 * block + 2**14
    assert meter.end_nbytes <= 2**14
    ts.unstream(hollow)


def test_plans_serve_slightly_smaller_batches(tmp_path: Path) -> None:
    profiled: list[str] = []
    options = options_of("auto", tmp_path) | {"progress": lambda what, *_: profiled.append(what)}
    with streamed(CASE, "1 MiB", **options) as model:
        for rows in (100, 99, 80, 90, 76, 100):
            model(torch.randn(rows, WIDTH)).sum().backward()
        assert profiled.count("profiling") == len(model.blocks)
        model(torch.randn(60, WIDTH)).sum().backward()
        assert profiled.count("profiling") == 2 * len(model.blocks)
