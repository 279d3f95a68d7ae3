"""What one accelerator layer promises: seconds, bytes, settings; each of these failed before there was one."""

import contextlib
import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scenarios import MACHINE, WIDTH, batch, network, our_training, streamed
from torch import nn

import tapestream as ts
from tapestream.accelerator import memory
from tapestream.accelerator.streams import timed
from tapestream.frontends.available import free_nbytes
from tapestream.frontends.module.stream import handle_of

CUDA = torch.device("cuda", 0)


def busy() -> None:
    """Work of some hundred milliseconds, queued."""
    torch.cuda._sleep(300_000_000)


def test_seconds_are_those_of_what_was_timed() -> None:
    """Not of what was queued before it; both are counted by the device, whatever the machine does meanwhile."""
    x = torch.randn(64, 64, device=CUDA)
    torch.cuda.synchronize()
    queued, _ = timed(CUDA, busy)
    busy()
    seconds, y = timed(CUDA, lambda: x * 2)
    assert torch.equal(y.cpu(), x.cpu() * 2)
    assert seconds < queued / 2


def test_what_the_allocator_holds_unused_is_free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = free_nbytes(CUDA)
    whole = torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)
    assert free_nbytes(CUDA) <= before - int(0.9 * whole.nbytes)
    del whole
    assert torch.cuda.memory_reserved() >= 256 << 20
    assert abs(free_nbytes(CUDA) - before) <= 4 << 20


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("budget", [32_768, 131_072])
def test_tensors_of_a_few_bytes_stay_within_the_budget(width: int, budget: int) -> None:
    """Each takes 512 bytes."""
    weight = nn.Parameter(torch.eye(width, device=CUDA) * 0.9)
    x = torch.randn(1, width, device=CUDA)
    run = ts.Loop(lambda s: torch.tanh(s @ weight), budget=budget)
    run(x, steps=300).sum().backward()
    weight.grad = None
    with ts.track_memory(CUDA) as meter:
        run(x, steps=300).sum().backward()
    assert meter.peak_nbytes <= 1.02 * budget


@pytest.fixture(params=["none", "1 MiB"])
def workspace(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bytes of the workspaces of products: a real GPU has its own."""
    simulated = sys.modules.get("simulated_gpu")
    memory.workspaces_nbytes.cache_clear()
    with simulated.load().knobs(workspace=(request.param != "none") << 20) if simulated else contextlib.nullcontext():
        yield memory.workspaces_nbytes(CUDA)
    memory.workspaces_nbytes.cache_clear()
    torch._C._cuda_clearCublasWorkspaces()


def test_workspaces_of_products_are_within_the_budget_of_a_streamed_model(workspace: int) -> None:
    """Two: the thread that calls and the one that differentiates have one each."""
    assert "simulated_gpu" not in sys.modules or workspace in (0, 2 << 20)
    gc.collect()
    before, x = torch.cuda.memory_allocated() - workspace, batch("cuda:0")
    model, optimizer = our_training("cuda:0")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan, peak = ts.report(model).plan, torch.cuda.max_memory_allocated() - before
    assert workspace <= plan.profile.outside_nbytes
    assert peak <= 1.05 * plan.peak_nbytes
    assert peak >= 0.7 * plan.peak_nbytes
    with pytest.raises(ts.BudgetError) as refused:
        ts.stream(network(), device="cuda:0", budget=1, home="host", machine=MACHINE)(x)
    assert refused.value.least_nbytes is not None
    assert refused.value.least_nbytes > workspace


def test_much_more_reserved_than_the_budget_is_warned_of_once() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    model, optimizer = our_training("cuda:0")
    x = batch("cuda:0")

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    mine = torch.empty(512 << 20, dtype=torch.uint8, device=CUDA)
    step()  # what others have is no concern of the budget
    del mine
    with pytest.warns(UserWarning, match=r"has reserved 5.. MiB of cuda:0.*expandable_segments"):
        step()
    step()
    ts.unstream(model)
    torch.cuda.empty_cache()


@pytest.fixture
def in_pieces() -> Iterator[None]:
    """What is free on the device are pieces of 2 MiB, and nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    pieces = [torch.empty(2 << 20, dtype=torch.uint8, device=CUDA) for _ in range(400)]
    del pieces[::2]
    yield
    del pieces
    torch.cuda.empty_cache()


def large_layers_nbytes() -> int:
    """A budget for `steps_of_large_layers`."""
    return (16 << 20) + memory.workspaces_nbytes(CUDA)


def steps_of_large_layers() -> None:
    layers = [nn.Linear(520, 520, device=CUDA) for _ in range(8)]  # a little more than 1 MiB
    model = ts.stream(nn.Sequential(*layers), device=CUDA, budget=large_layers_nbytes(), home="host", machine=MACHINE)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model(torch.ones(2, 520, device=CUDA)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ts.unstream(model)


def test_pieces_larger_than_what_was_asked_for_are_warned_of_once(in_pieces: None) -> None:
    with pytest.warns(UserWarning, match=r"of cuda:0 for a budget of .* had asked for .*expandable_segments") as said:
        steps_of_large_layers()
    assert len(said) == 1


def test_what_the_warning_advises_helps(in_pieces: None, request: pytest.FixtureRequest) -> None:
    if torch.cuda.get_device_name() != "Simulated GPU":
        pytest.skip("a device's allocator is told before it begins")
    with request.getfixturevalue("simulator").knobs(expandable=1):
        before = torch.cuda.memory_allocated()
        steps_of_large_layers()
        assert torch.cuda.max_memory_allocated() - before <= 1.02 * large_layers_nbytes()


class Scratch(torch.autograd.Function):
    """Its backward takes what nobody has planned for, once it is told to."""

    nbytes = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.empty(Scratch.nbytes, dtype=torch.uint8, device=gradient.device)
        return gradient


class Scratching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scratch.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


def test_a_call_that_takes_more_than_its_budget_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = large_layers_nbytes()
    layers = [Scratching(512, 512, device=CUDA) for _ in range(8)]
    model = ts.stream(nn.Sequential(*layers), device=CUDA, budget=budget, home="host", machine=MACHINE)

    def steps() -> None:
        for _ in range(3):
            model(torch.ones(2, 512, device=CUDA)).sum().backward()
            model.zero_grad()

    steps()
    assert ts.report(model).exceeded is None
    monkeypatch.setattr(Scratch, "nbytes", 64 << 20)
    with pytest.warns(ts.BudgetExceeded, match=r"stream: a call holds .* but a budget of .* was asked for") as said:
        steps()
    assert len(said) == 1
    assert "stream: a call holds" in str(ts.report(model).exceeded)
    ts.unstream(model)


def test_a_model_that_goes_while_another_runs_had_its_own_bytes() -> None:
    """What is garbage when a model is streamed may be gone when somebody looks at the other's peak, and its budget with
    it: the warning came for its bytes then, now and then."""
    gc.collect()
    gc.disable()
    try:
        layers = [nn.Linear(512, 512, device=CUDA) for _ in range(8)]
        gone = ts.stream(nn.Sequential(*layers), device=CUDA, home="device", budget="256MiB")
        gone(torch.ones(2, 512, device=CUDA)).sum().backward()
        there = weakref.ref(handle_of(gone))
        del gone, layers  # but it holds itself
        model = ts.stream(network(), device=CUDA, home="host", budget="600 KiB", machine=MACHINE)
        for step in range(3):
            assert (there() is None) == (step > 0)
            model(batch(CUDA)).square().mean().backward()
            model.zero_grad()
            gc.collect()
    finally:
        gc.enable()
    assert ts.report(model).exceeded is None


def test_the_first_product_of_a_profile_does_not_seem_to_take_the_workspace(workspace: int) -> None:
    weight, x = torch.randn(16, 16, device=CUDA, requires_grad=True), torch.randn(16, 16, device=CUDA)
    for run in (
        ts.Chain([lambda x: x @ weight] * 3, budget="100 KiB"),
        ts.Program(lambda x: x @ weight, budget="100KiB"),
    ):
        memory.workspaces_nbytes.cache_clear()
        torch._C._cuda_clearCublasWorkspaces()
        run(x).sum().backward()
    ts.Loop(lambda s: s @ weight, budget="100 KiB")(x, steps=3).sum().backward()


def test_a_stage_too_deep_for_the_thread_of_backward_is_refused_by_its_forward() -> None:
    """PyTorch frees graphs that Python has seen by recursion, there in a thread whose stack is small."""
    weight = torch.ones(4, device=CUDA, requires_grad=True)

    def stage(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20_100):
            x = x * weight
        return x

    with pytest.raises(ts.GradientError, match=r"more than 20000 operations.*in a thread whose stack does not grow"):
        ts.Chain([stage, stage], budget="200 MiB")(torch.ones(4, device=CUDA))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("of", ["block", "head"])
def test_a_penalty_on_weights_that_travel_is_refused_in_one_backward_with_the_model(of: str, update: str) -> None:
    """Moved between devices, a parameter has another node in each call's graph: the right one is watched."""
    model = network()
    model.last = nn.Linear(WIDTH, 20_000)
    streamed("cuda", 9 * model.last.weight.nbytes, model)
    if update == "backward":
        ts.optimizer(model, torch.optim.SGD, lr=0.1, update=update)
    weight = model.last.weight if of == "head" else next(model.blocks.parameters())
    with pytest.raises(ts.GradientError, match="was used otherwise than by calling that module"):
        (model(batch("cuda")).sum() + weight.square().sum().to(CUDA)).backward()


def test_python_objects_beside_states_take_nothing_of_the_device() -> None:
    """A loop holds as many tiny states as fit: each takes 512 bytes there, and nothing else."""
    weight = nn.Parameter(torch.eye(8, device=CUDA) * 0.9)
    run = ts.Loop(lambda s: torch.tanh(s @ weight), budget=65_536, planner="revolve", chunk=1)
    run(torch.randn(1, 8, device=CUDA), steps=300).sum().backward()
    assert run.plan is not None
    assert run.plan.profile.stages[0].output_nbytes == 512
    assert run.plan.peak_nbytes >= 0.9 * 65_536


def test_a_tensor_counts_as_the_device_takes_it() -> None:
    before = torch.cuda.memory_allocated()
    kept = [torch.empty(n, dtype=torch.uint8, device=CUDA) for n in (1, 511, 512, 513, 70_000)]
    assert sum(map(memory.tensor_nbytes, kept)) == torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("fused", [False, True])
def test_counters_of_steps_are_planned_for(fused: bool) -> None:
    """Fused optimizers keep one on the device for each parameter, of a streamed block too."""
    model = streamed("cuda", "2 MiB")
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=0.1, master=None, fused=fused)
    assert optimizer.scalar_nbytes() == (512 * len(list(model.parameters())) if fused else 0)
    model(batch("cuda")).square().mean().backward()
    optimizer.step()
    counters = [optimizer.state[p]["step"] for p in model.parameters()]
    assert sum(memory.tensor_nbytes(t) for t in counters if t.is_cuda) == optimizer.scalar_nbytes()


def test_torchs_scaler_is_refused_where_gradients_lie_in_ram() -> None:
    model = streamed("cuda")
    optimizer = ts.optimizer(model, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(batch("cuda")).square().mean()
    scaler.scale(loss).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ts.InputError, match=r"use ts\.GradScaler"):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))


def test_algorithms_are_not_tried_inside_of_what_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.backends.cudnn.benchmark:
                raise RuntimeError("algorithms are tried here")
            return torch.tanh(x)

    x = torch.randn(8, 8, device=CUDA, requires_grad=True)
    ts.Chain([Asks() for _ in range(4)], budget="1MiB")(x).sum().backward()
    ts.Loop(Asks(), budget="1MiB")(x, steps=3).sum().backward()
    ts.Program(Asks(), budget="1MiB")(x).sum().backward()
    assert torch.backends.cudnn.benchmark
    model = streamed("cuda")
    model(batch("cuda")).sum().backward()
    assert "torch.backends.cudnn.benchmark is off in blocks" in str(ts.report(model))
    assert "reserved" in str(ts.report(model))


def test_a_stage_that_calls_backward_is_refused_while_gradients_lie_in_ram() -> None:
    """They are left where they are: a parameter on the device takes no gradient in RAM."""
    model, plain = streamed("cuda"), network().to("cuda")
    for m in (model, plain):
        for rows in (32, 8):  # the second is profiled beside the first's gradients
            m(batch("cuda")[:rows]).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad.cpu(), q.grad.cpu()) for p, q in pairs)


def test_idle_page_locked_memory_does_not_grow_with_new_lengths() -> None:
    stages = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
    chain = ts.Chain([copy.deepcopy(s).to("cuda") for s in stages], budget="160 KiB", home="host", planner="offload")
    taken = []
    for rows in range(16, 40):
        chain(torch.randn(rows, 128, device="cuda")).square().mean().backward()
        pool = chain._below._opened[0]
        taken.append(pool._total_nbytes(ts.Tier.HOST))
    assert max(taken[:12]) > 0
    assert max(taken[12:]) <= 1.25 * max(taken[:12])
