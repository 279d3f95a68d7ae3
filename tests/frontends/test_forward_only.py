"""Calls without gradients: exact, within the budget, with the next blocks on their way, and training as if they had
not been."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from pairs import CASE, Pair, both, sgd
from place import DEVICE
from streamable import WIDTH, Chained, Dense, Model, numbers
from streaming import budget_at, everything, loss_at, options_of, streamed
from thinned import one_in
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.measured import Measured
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.frontends.module.stream import handle_of
from tapestream.storage.meter import track_memory

PLACES = [("auto", "disk"), ("adversarial", "disk"), ("fake_streams", "disk"), ("fake_streams", "host")]
GUARDS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "eval": contextlib.nullcontext}


class Noisy(Dense):
    """A block that draws random numbers, counts its runs and calls its weights twice."""

    def __init__(self) -> None:
        super().__init__(64)
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(super().forward(super().forward(x))))


BLOCK = 5 * 4096  # bytes of a `Noisy`: 64 x 64 floats and 3 x 64 more, rounded up to pages
NOISY = Model(lambda: Chained([Noisy() for _ in range(10)], nn.Linear(WIDTH, 64), nn.Linear(64, 2)), numbers(6, WIDTH))


def device_nbytes(model: nn.Module) -> int:
    return handle_of(model).pool.held_nbytes(ts.Tier.DEVICE)


def budget_for(blocks: float, working: int = 16_000) -> int:
    """Bytes for this many blocks of NOISY beside what a call makes."""
    outside = sum(2 * p.nbytes for n, p in NOISY.model().named_parameters() if not n.startswith("blocks"))
    return int(outside + sum(b.nbytes for b in NOISY.model().buffers()) + working + blocks * BLOCK)


@contextlib.contextmanager
def beside_plain(blocks: float, engine: str, home: str, folder: Path) -> Iterator[tuple[nn.Module, nn.Module]]:
    with streamed(NOISY, budget_for(blocks), **options_of(engine, folder, home)) as ours:
        yield NOISY.model(), ours


@pytest.mark.thinned(3)
@pytest.mark.parametrize("casting", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize(
    ("engine", "home", "blocks"), one_in(2, [(*one, n) for one in PLACES for n in (1.5, 4.5, 100)])
)
def test_outputs_are_those_of_plain_pytorch(
    blocks: float, engine: str, home: str, guard: str, casting: bool, tmp_path: Path
) -> None:
    """Weights change between calls, in ways that PyTorch does not count, and within one autocast."""
    with streamed(NOISY, "1 MiB" if guard == "eval" else budget_for(blocks), **options_of(engine, tmp_path, home)) as m:
        traces = []
        for model in (NOISY.model(), m):
            seed(3)
            outs = {}
            with GUARDS[guard](), torch.autocast("cpu", torch.bfloat16, enabled=casting):
                for number in range(6):
                    model.train(number % 2 == 0 and guard != "eval")
                    outs[f"{number}"] = model(torch.randn(6, WIDTH)).detach().clone()
                    if number == 3 and not casting:  # plain autocast would not see new weights
                        for p in model.parameters():
                            p.data.mul_(0.5)
            traces.append(outs | everything(model) | {"torch": torch.get_rng_state()})
    assert_same(*traces)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("engine", "home"), PLACES)
@pytest.mark.parametrize(("blocks", "staying"), [(1.5, 0), (2.5, 0), (4.5, 2), (7.5, 5), (11, 10)])
def test_what_stays_and_what_comes_ahead(blocks: float, staying: int, engine: str, home: str, tmp_path: Path) -> None:
    """From the second repetition on, all that fits beside two blocks stays, and no more is ever held than fits."""
    two_hops = engine == "fake_streams" and home == "disk"
    with beside_plain(blocks, engine, home, tmp_path) as (plain, ours):
        held: list[int] = []
        moving: list[int] = []
        for block in ours.blocks:
            block.register_forward_pre_hook(lambda *_: held.append(device_nbytes(ours)))
            block.register_forward_pre_hook(lambda *_: moving.append(len(handle_of(ours).store.copies.tickets)))
        x = NOISY.batch()[0]
        with torch.no_grad():
            plain.eval()
            ours.eval()
            expected = plain(x)
            for number in range(5):
                held.clear()
                moving.clear()
                assert torch.equal(ours(x), expected)
                assert max(held) <= max(1, blocks) * BLOCK
                assert not handle_of(ours).store.copies.tickets
                if number == 0:
                    assert max(moving) == 0
                elif number == 1:
                    assert (max(moving) > 0) == (blocks > 2 or two_hops)
                assert device_nbytes(ours) == (staying * BLOCK if number > 1 else 0)


def test_decoding_moves_only_what_does_not_fit(tmp_path: Path) -> None:
    with beside_plain(6.5, "auto", "disk", tmp_path) as (_, ours), torch.no_grad():
        for _ in range(4):
            ours(NOISY.batch()[0])
        lane, engine = (ts.Tier.DISK, ts.Tier.DEVICE), handle_of(ours).engine
        before = engine.statistics().bytes_moved[lane]
        ours(NOISY.batch()[0])
        assert engine.statistics().bytes_moved[lane] - before == 6 * BLOCK
        kept = sorted(value.index for value in handle_of(ours).store.copies.resident)
        assert kept[0] == 0
        assert kept[-1] < len(ours.blocks) - 1, "while the last block runs, nothing else could come"
        assert all(2 <= b - a <= 4 for a, b in itertools.pairwise(kept)), f"not spread evenly: {kept}"


@pytest.mark.parametrize("casting", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [6, 400])
def test_the_peak_is_within_the_budget(rows: int, casting: bool, tmp_path: Path) -> None:
    """Ten blocks in room for four and a half; sizes that were measured, and larger ones that were not quite."""
    working = 6 * 4 * 64 * rows + 20_000
    with streamed(NOISY, budget_for(4.5, working), **options_of("auto", tmp_path)) as model, torch.no_grad():
        for each in (rows, rows, rows, round(1.2 * rows), rows):
            x = torch.randn(each, WIDTH)
            before = device_nbytes(model) + outside_nbytes(handle_of(model))
            with torch.autocast("cpu", torch.bfloat16, enabled=casting):
                if not handle_of(model)._forward_only._known:
                    model(x)
                with track_memory() as meter:
                    model(x)
            aligning = 5 * 4096  # for every block, so that it begins with a page
            assert before + meter.peak_nbytes <= budget_for(4.5, working) + aligning
        assert device_nbytes(model) > 0


def test_inside_a_profiler_one_block_at_a_time_is_brought(tmp_path: Path) -> None:
    with beside_plain(4.5, "auto", "disk", tmp_path) as (plain, ours), torch.no_grad():
        plain.eval()
        ours.eval()
        x = NOISY.batch()[0]
        with track_memory() as meter:
            out = ours(x)
        assert torch.equal(out, plain(x))
        assert meter.peak_nbytes < 2 * BLOCK


def test_larger_calls_are_measured_again_and_smaller_ones_are_served() -> None:
    one = Measured((100, 8, 0), 1000, (0, 1))
    assert one.growth((50, 8, 0)) == 1
    assert one.estimate((50, 4, 0)) == 1000
    assert one.growth((120, 8, 0)) == pytest.approx(1.2)
    assert one.estimate((120, 8, 0)) == 1440
    assert one.growth((50, 8, 1)) == float("inf")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_training_goes_on_as_if_nothing_had_been(pair: Pair, guard: Any) -> None:
    """Calls in a row before a step, within it and after it."""

    def look(model: nn.Module, times: int) -> float:
        model.eval()
        with guard():
            found = [float(model(torch.ones(3, WIDTH)).sum()) for _ in range(times)]
        model.train()
        return sum(found)

    def run(model: nn.Module, optimizer: Any) -> None:
        weight = look(model, 4)
        loss = loss_at(model, CASE)
        (loss * weight * look(model, 2)).backward()
        look(model, 3)

    both(pair, run)


def test_steps_without_a_forward_after_calls_without_gradients(tmp_path: Path) -> None:
    options = options_of("adversarial", tmp_path)
    traces = []
    with streamed(CASE, 4 * budget_at("full", CASE, sgd, **options), **options) as ours:
        theirs = CASE.model()
        optimizers = (torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours))
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            with torch.no_grad():
                for _ in range(4):
                    model(torch.ones(3, WIDTH))
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            with torch.no_grad():
                traces.append(everything(model) | {"out": model(torch.ones(3, WIDTH))})
    assert_same(*traces)


@pytest.mark.parametrize(("engine", "home"), PLACES)
def test_an_exception_leaves_nothing_on_its_way(engine: str, home: str, tmp_path: Path) -> None:
    with beside_plain(4.5, engine, home, tmp_path) as (plain, ours), torch.no_grad():
        plain.eval()
        ours.eval()
        x = NOISY.batch()[0]
        for _ in range(2):
            ours(x)
            hook = ours.blocks[5].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ours(x)
            hook.remove()
            assert not handle_of(ours).store.copies.tickets
        assert torch.equal(ours(x), plain(x))


def test_blocks_in_another_order_or_alone(tmp_path: Path) -> None:
    with beside_plain(4.5, "adversarial", "disk", tmp_path) as (plain, ours), torch.no_grad():
        models = [(plain.eval(), list(plain.blocks)), (ours.eval(), list(ours.blocks))]
        for number in range(6):
            for model, blocks in models:
                model.blocks = nn.ModuleList(blocks[::-1] if number % 2 else blocks[number:])
            x, y = torch.randn(4, WIDTH), torch.randn(4, 64)
            assert torch.equal(ours(x), plain(x))
            assert torch.equal(ours.blocks[-2](y), plain.blocks[-2](y))


def test_what_users_took_of_a_block_that_stayed_is_theirs(tmp_path: Path) -> None:
    with beside_plain(6.5, "auto", "disk", tmp_path) as (_, ours):
        with torch.no_grad():
            for _ in range(4):
                ours(NOISY.batch()[0])
        taken = ours.state_dict()
        before = everything(ours)
        loss_at(ours, NOISY).backward()
        names = [name for name, _ in ours.named_parameters()]
        assert_same({n: before[n] for n in names}, {n: taken[n] for n in names})


class Decaying(nn.Module):
    """A block that writes into its own weight when it is asked to, as PEFT's layers do that unmerge themselves."""

    asked = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(128, 128), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asked:
            if self.how == "data":
                self.linear.weight.data -= 0.1 * self.linear.weight.data
            elif self.how == "other data":
                self.linear.weight.data = 0.9 * self.linear.weight.data
            else:
                self.linear.weight[3, 5] += 0.5
        return x + torch.tanh(self.linear(x))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["data", "other data", "one number"])
@pytest.mark.parametrize(("engine", "home"), PLACES)
def test_what_a_block_writes_into_its_weights_is_kept(
    engine: str, home: str, how: str, frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they have come from the disk for this call alone."""
    outcomes = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model, x, outcome = nn.Sequential(*(Decaying(how) for _ in range(5))), torch.randn(32, 128), []
        model[1].requires_grad_(not frozen)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if folder is not None:
            ts.stream(model, budget=500_000, **options_of(engine, folder, home))
            optimizer = ts.optimizer(model, torch.optim.SGD, lr=0.01)
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), monkeypatch.context() as patch:
                patch.setattr(Decaying, "asked", True)
                outcome += [loss.detach(), *model(x)]
        if folder is not None:
            ts.unstream(model)
        outcomes.append([*outcome, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_that_takes_more_than_the_budget_is_refused_with_the_least(home: str, mode: Any, tmp_path: Path) -> None:
    """What the error names suffices, and is what the call takes; the model goes on."""
    torch.manual_seed(1)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]).to(DEVICE).eval()
    x = torch.randn(128, 64, device=DEVICE)
    wanted = plain(x)
    options = options_of("auto", tmp_path, home)
    model = ts.stream(copy.deepcopy(plain), budget="16KiB", **options)
    with mode():
        least = set()
        for _ in range(2):  # once measured, and once known
            with pytest.raises(BudgetError, match="a call without gradients of this size needs at least") as refused:
                model(x)
            least.add(refused.value.least_nbytes)
    ts.unstream(model)
    (nbytes,) = least
    again = ts.stream(copy.deepcopy(plain), budget=nbytes, **options)
    with mode():
        for _ in range(3):
            assert torch.equal(again(x), wanted)
    ts.unstream(again)
