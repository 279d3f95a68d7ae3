"""What a program's record takes in host memory, and what it keeps and runs again when programs grow."""

import gc
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.program_long import W, halved, most_kept, program
from tapestream.frontends.program.cuts import MANY
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.sizes import Sizes
from tapestream.ir import Backward, Forward, Phase, PhaseKind, Record
from tapestream.planners._recurrences import least_forwards
from tapestream.storage.meter import track_memory

MOST = 400  # bytes of host memory an operation


@pytest.mark.full
def test_record_and_plan_take_few_bytes_an_operation() -> None:
    """All that Python allocates: arrays, handles in the graph, plans, and tables while these are made; autograd's own
    nodes are not Python's. What does not grow with the program is left out."""
    found = []
    for operations in (1_500, 1_500, 3_500):  # planners remember tables from the first
        run = Program(program, budget=20_000, planner="revolve")
        gc.collect()
        tracemalloc.start()
        try:
            y = run(torch.ones(4, 4), operations)
            found.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        assert y.requires_grad
    (now, most), (later, most_later) = found[1:]
    assert (later - now) / 2_000 < MOST
    assert (most_later - most) / 2_000 < MOST


def test_the_arrays_of_a_long_record() -> None:
    operations = 20_000
    run = Program(program, budget="64MiB")
    y = run(torch.ones(4, 4), operations)
    assert y.requires_grad
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    assert len(replays.record) == operations
    handles = sum(replays.record.packs) * sys.getsizeof(1 << 40)
    assert (replays.record.host_nbytes() * 9 / 8 + handles) / operations < MOST / 2  # arrays have an eighth to spare


_CHILD = """
import sys, torch
from tests.frontends.program.test_program_record import W, program
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.sizes import Sizes
def resident():
    return int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("RssAnon"))) * 1024
def plain(x, steps):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda n: n):
        return program(x, steps)
run = plain if sys.argv[1] == "plain" else Program(program, budget=400_000, planner="revolve")
run(torch.ones(4, 4), 100)
before = resident()
y = run(torch.ones(4, 4), 1_000_000)
print(resident() - before)
"""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_million_operations_are_recorded_in_400_bytes_each() -> None:
    """Beside autograd's own nodes: those that plain PyTorch makes with everything saved thrown away."""
    grown = [
        int(subprocess.run([sys.executable, "-c", _CHILD, kind], check=True, capture_output=True, text=True).stdout)
        for kind in ("plain", "program")
    ]
    assert grown[1] - grown[0] < MOST * 1_000_000


def run_again(planner: str, operations: int, budget: int | None = None) -> tuple[Program, int, int]:
    """A program's second call, and the stretches and operations that its backward has run again. ``budget``: bytes,
    None for a quarter of the states."""
    run = Program(program, budget=budget or operations * 16, planner=planner)
    for _ in range(2):
        y = run(torch.ones(4, 4), operations).sum()
        assert run._replays is not None
        replays = run._replays()
        assert replays is not None
        y.backward()
    W.grad = None
    return run, replays.steps.stages, replays.steps.operations


def check_forwards(planner: str, operations: int) -> None:
    run, stages, again = run_again(planner, operations)
    assert run.report is not None
    assert run.report.planned
    plan = run.plan
    assert plan is not None
    n = len(plan.profile)
    assert n + stages == plan.simulation.forwards
    assert again <= stages * ceil(1.5 * operations / n)  # stretches are of like length


@pytest.mark.parametrize("planner", ["revolve", "binomial", "bisection"])
def test_as_many_stretches_run_as_the_plan_counts(planner: str) -> None:
    check_forwards(planner, 2_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("planner", ["revolve", "binomial", "bisection"])
def test_as_many_stretches_run_as_the_plan_counts_in_long_programs(planner: str) -> None:
    check_forwards(planner, 100_000)


def test_ten_times_longer_takes_one_more_restart_checkpoint_per_doubling() -> None:
    kept = []
    for operations in (200, 2_000):
        run, _, _ = run_again("bisection", operations)
        kept.append(most_kept(run))
    assert kept[1] - kept[0] <= ceil(log2(10))


@pytest.mark.parametrize(
    ("planner", "states"),
    [pytest.param("bisection", 22, marks=pytest.mark.full), pytest.param("auto", 18, marks=pytest.mark.full)],
)
def test_a_long_program_in_the_memory_of_a_few_states(planner: str, states: int) -> None:
    """Of a tape of 10,000: in more stretches than are tried where more memory is given."""
    operations, side = 20_000, 48
    w = (torch.randn(side, side, generator=torch.Generator().manual_seed(0)) / side).requires_grad_()
    program(torch.ones(side, side), operations, w).sum().backward()
    wanted, w.grad = w.grad, None
    run = Program(program, budget=states * w.nbytes, planner=planner)
    for _ in range(2):
        with track_memory() as meter:
            run(torch.ones(side, side), operations, w).sum().backward()
        assert torch.equal(w.grad, wanted)
        assert meter.peak_nbytes <= 1.05 * states * w.nbytes
        w.grad = None
    assert run.report is not None
    assert run.report.planned
    assert run.report.stages > 4 * MANY


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_binomial_beats_bisection_in_a_long_program() -> None:
    """In 1% more memory, since a stretch may be an operation longer than another, by the factor of the table at least:
    T(n) forwards of bisection over F(n, s) of binomial checkpointing with as many slots, the initial state's included.
    """
    operations = 100_000
    bisected, stages, again = run_again("bisection", operations)
    assert bisected.plan is not None
    n = len(bisected.plan.profile)
    assert n + stages == halved(n)
    run, stages, fewer = run_again("binomial", operations, int(1.01 * bisected.plan.peak_nbytes))
    assert run.plan is not None
    assert stages == least_forwards(len(run.plan.profile), most_kept(run))
    tabled = halved(n) / (n + least_forwards(n, most_kept(bisected) + 1))
    assert tabled > 1.1
    assert operations + again >= tabled * (operations + fewer)


class Products(TorchDispatchMode):
    """Counts products of matrices that are computed."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_a_stretch_recorded_for_what_it_saves_ends_before_its_last_product() -> None:
    """One operation a stretch: what a product saves is there before it computes."""
    operations = 24
    run = Program(program, budget=500, planner="revolve")
    for _ in range(2):
        y = run(torch.ones(4, 4), operations).sum()
        assert run.report is not None
        assert run.report.stages == run.report.operations
        assert run._replays is not None
        replays = run._replays()
        assert replays is not None
        with Products() as computed:
            y.backward()
    W.grad = None
    assert run.plan is not None
    actions = list(run.plan.schedule)
    back = actions[actions.index(Phase(PhaseKind.BACKWARD)) :]
    passed = [k for a in back if isinstance(a, Forward) for k in range(a.start, a.stop)]
    recorded = [a.stage for a, b in pairwise(back) if isinstance(a, Record) and not isinstance(b, Backward)]
    again = sum(k % 2 == 0 for k in (*passed, *recorded))
    assert len(passed) > operations
    assert computed.count == (operations - 1) + again  # two products reverse one; the first gives no gradient of x


def test_what_an_operation_costs_is_told_by_all_of_its_kind() -> None:
    """A hiccup while one was measured says nothing; the same function on other shapes is another kind."""

    def of_two_sizes(x: torch.Tensor) -> torch.Tensor:
        small, large = x @ W, torch.cat([x] * 8) @ W
        for _ in range(4):
            small, large = torch.tanh(small), torch.tanh(large)
        return torch.cat((small, large))

    run = Program(of_two_sizes)
    y = run(torch.ones(4, 4))
    assert run._replays is not None
    replays = run._replays()
    assert replays is not None
    record = replays.record
    tanhs = [k for k in range(len(record)) if record.pattern(k).function is torch.tanh]
    for k in range(len(record)):
        record.seconds[k] = 1 + k % 2
    for k, seconds in zip(tanhs, (3, 20, 100, 40, 5, 20, 4, 60), strict=True):  # small and large in turn
        record.seconds[k] = seconds
    found = Sizes(record, []).seconds()
    assert [found[k] for k in tanhs] == [4, 20] * 4
    assert y.requires_grad
