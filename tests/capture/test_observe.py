"""What watching a run shows, and what is left of it afterwards."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.capture.cells import Contents, among
from tapestream.capture.fused_steps import fused_steps
from tapestream.capture.observe import UnknownModules, observed


def test_what_is_written_from_outside_and_what_is_not() -> None:
    mine, given, view = torch.zeros(4), torch.zeros(4), torch.zeros(8)
    with observed([given], []) as seen:
        own = torch.zeros(4).add_(1)
        given.add_(own)
        mine.data.add_(1)
        view[2:4].fill_(3)
    assert [among(seen.cells, t) for t in (mine, given, view, own)] == [True, False, True, False]
    seen.put_back()
    assert mine.tolist() == [0] * 4
    assert view.tolist() == [0] * 8
    assert (mine._version, view._version) == (0, 0)
    assert given.tolist() == [1] * 4


def test_native_kernels_that_do_not_say_what_they_write() -> None:
    norm = nn.BatchNorm1d(3)
    with observed([], []) as seen:
        nn.functional.batch_norm(torch.randn(4, 3), norm.running_mean, norm.running_var, training=True)
        nn.functional.batch_norm(torch.randn(4, 3), norm.running_mean, norm.running_var, training=False)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert among(seen.cells, norm.running_mean)
    assert among(seen.cells, norm.running_var)
    seen.put_back()
    assert norm.running_mean.tolist() == [0] * 3
    with observed([], []) as seen:
        nn.functional.batch_norm(torch.randn(4, 3), norm.running_mean, norm.running_var, training=False)
    assert seen.cells == ()


def test_generators_go_back_to_where_they_were() -> None:
    own = torch.Generator().manual_seed(1)
    first = own.get_state()
    with observed([], []) as seen:
        torch.rand(3, generator=own)
        torch.zeros(3).normal_(generator=own)
        torch.rand(3)
    assert [one._cdata for one, _ in seen.generators] == [own._cdata]
    seen.put_back()
    assert torch.equal(own.get_state(), first)


def test_modules_that_nobody_knew() -> None:
    """Their buffers and counters are put back, so that the run can be made again."""
    known, other = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))

    def watched() -> None:
        with observed([], [known]):
            known(torch.randn(4, 3))
            other(torch.randn(4, 3))

    with pytest.raises(UnknownModules) as found:
        watched()
    assert found.value.modules == [other]
    assert other[0].num_batches_tracked == 0
    assert other[0].running_mean.tolist() == [0] * 3
    assert known.num_batches_tracked == 1


def test_memory_that_nobody_holds_is_no_cell() -> None:
    holder = [torch.zeros(4)]
    with observed([], []) as seen:
        holder[0].add_(1)
        torch.Tensor.add_(torch.from_numpy(torch.zeros(2).numpy()), 1)
    assert len(seen.cells) == 1
    holder.clear()
    gc.collect()
    assert not seen.cells[0].alive
    assert Contents.take(seen.cells).copies == ()
    seen.put_back()


def test_exchanged_contents_leave_content_and_version() -> None:
    cell = torch.zeros(3)
    with observed([], []) as seen:
        cell.add_(1)
    then = Contents.take(seen.cells)
    cell.fill_(7)
    version = cell._version
    with then.exchanged():
        assert cell.tolist() == [1] * 3
        cell.add_(1)
    assert cell.tolist() == [7] * 3
    assert cell._version == version


@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_fused_optimizers_are_counted(fused: bool) -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([one, other], fused=fused)
    one.grad = torch.ones(3)
    for _ in range(2):
        optimizer.step()
    assert [fused_steps(one), fused_steps(other)] == [2 * fused, 0]


def test_what_cells_held_is_in_the_budget() -> None:
    """A bank of which each stage writes a row: of all of it there is a copy for each stage."""
    bank, weights = torch.zeros(64, 1024), [torch.eye(64).div(2).requires_grad_() for _ in range(6)]

    def stage_of(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def stage(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                bank[0].add_(x.mean())
            return torch.tanh(x @ weight) + bank[0, 0].clone() * x

        return stage

    x, stages = torch.ones(256, 64, requires_grad=True), [stage_of(weight) for weight in weights]
    with pytest.raises(ts.BudgetError) as refused:
        ts.Chain(stages, budget=1)(x)
    assert refused.value.least_nbytes is not None
    chain = ts.Chain(stages, budget=refused.value.least_nbytes)
    chain(x).sum().backward()
    x.grad = None
    with ts.track_memory() as meter:
        chain(x).sum().backward()
    assert 6 * bank.nbytes < meter.peak_nbytes <= refused.value.least_nbytes


@pytest.mark.parametrize("held", [True, False])
def test_memory_that_is_replaced_between_calls_is_found_again(held: bool) -> None:
    """Also where somebody holds what was there when the stage was profiled."""
    before = list[torch.Tensor]()

    class Holder:
        vector = torch.zeros(8)

    def train(budget: int | None) -> list[torch.Tensor]:
        holders = [Holder() for _ in range(6)]
        weights = [torch.eye(8).div(2).requires_grad_() for _ in holders]

        def stage_of(holder: Holder, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            def stage(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    holder.vector.mul_(0.5).add_(x.mean(0))
                return torch.tanh(x @ weight) + holder.vector.clone() * x

            return stage

        stages = [stage_of(*pair) for pair in zip(holders, weights, strict=True)]
        run: Any = (
            nn.Sequential(*(Called(stage) for stage in stages)) if budget is None else ts.Chain(stages, budget=budget)
        )
        found = []
        for turn in range(3):
            for k, holder in enumerate(holders):
                before.extend([holder.vector] * held)
                holder.vector = torch.full((8,), 0.1 * k + turn)
            x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            run(x).square().sum().backward()
            found += [x.grad, *(holder.vector.clone() for holder in holders)]
        return [*found, *(weight.grad for weight in weights)]

    class Called(nn.Module):
        def __init__(self, stage: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stage(x)

    with pytest.raises(ts.BudgetError) as refused:
        train(1)
    assert all(map(torch.equal, train(refused.value.least_nbytes), train(None)))


@pytest.mark.parametrize("front", ["chain", "loop"])
def test_what_a_run_wrote_before_it_failed_is_put_back(front: str) -> None:
    """A profile changes nothing, also where the code does not work."""
    vector = torch.zeros(4)

    def stage(x: torch.Tensor) -> torch.Tensor:
        vector.add_(1)
        raise ValueError("broken")

    x = torch.ones(4, requires_grad=True)
    run: Any = ts.Chain([stage, stage], budget=2**20) if front == "chain" else ts.Loop(stage, budget=2**20)
    with pytest.raises(ValueError, match="broken"):
        run(x) if front == "chain" else run(x, steps=3)
    assert (vector.tolist(), vector._version) == ([0] * 4, 0)
