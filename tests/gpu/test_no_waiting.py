"""Steps that have been seen before never make the host wait for the device, but where users get what they can touch."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("it is the simulated GPU that counts who waits", allow_module_level=True)

from scenarios import MACHINE, batch, blocks, network, our_training, streamed
from simulated_gpu import Simulator
from simulated_gpu.counters import Synchronisation

import tapestream as ts

_WARM = 3
_MAY = {
    "hand_over": "executor/copies.py",  # control returns to the user, who can touch host memory: copies of it are over
    "_answer": "executor/doubts.py",  # of an event that has happened, or of the ninth call before this one
    "before": "executor/engines/cuda.py",  # a thread of the disk's, beside the one that trains
}
"""Functions that may wait for an event, and where they are."""


def unasked(simulator: Simulator, step: Callable[[], object]) -> list[str]:
    """Who else makes the host wait in a step that has been seen before."""
    for _ in range(_WARM):
        step()
    gc.collect()  # what other tests have left waits when it goes
    torch.cuda.synchronize()
    with simulator.counters.host_synchronisations() as found:
        step()
    return [str(one) for one in found if not _may(one)]


def _may(seen: Synchronisation) -> bool:
    lines = [line for line in seen.stack.splitlines() if line.strip().startswith("File ")]
    asked = any(line.endswith(f"in {name}") and file in line for line in lines for name, file in _MAY.items())
    return asked and seen.who == "synchronize (event)"


def test_whoever_else_waits_is_found(simulator: Simulator) -> None:
    x = batch("cuda")
    assert len(unasked(simulator, x.sum().item)) == 1
    assert len(unasked(simulator, torch.cuda.synchronize)) == 1


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_a_training_step(simulator: Simulator, home: str, update: str, tmp_path: Path) -> None:
    options = {"folder": tmp_path} if home == "disk" else {}
    budget = "16 MiB" if home == "device" else "1000 KiB"
    model, optimizer = our_training("cuda", network(0.1), update=update, home=home, budget=budget, **options)
    x = batch("cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert unasked(simulator, step) == []


def test_a_step_without_gradients(simulator: Simulator) -> None:
    model, x = streamed("cuda"), batch("cuda")

    def step() -> None:
        with torch.no_grad():
            model(x)

    assert unasked(simulator, step) == []


def test_a_chain_that_offloads(simulator: Simulator) -> None:
    stages = blocks(12, dropout=0.1).cuda()
    chain = ts.Chain(list(stages), budget="120 KiB", machine=MACHINE, home="host", planner="offload")
    _differentiated(simulator, chain, stages)


@pytest.mark.parametrize("planner", ["joint", "offload"])
def test_a_program_that_moves(simulator: Simulator, planner: str) -> None:
    layers = blocks(12, dropout=0.1).cuda()
    program = ts.Program(lambda x: layers(x), budget="200 KiB", planner=planner, machine=MACHINE)
    _differentiated(simulator, program, layers)
    assert program.copies.copies > 0


def _differentiated(simulator: Simulator, call: Callable[[Tensor], Tensor], owner: nn.Module) -> None:
    x = batch("cuda")

    def step() -> None:
        call(x).square().mean().backward()
        owner.zero_grad()

    assert unasked(simulator, step) == []
