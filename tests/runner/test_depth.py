"""Graphs that are looked at may be deep: PyTorch frees these by recursion, and the process must not end there."""

import subprocess
import sys
import threading

import pytest
import torch

import tapestream as ts
from tapestream.errors import GradientError
from tapestream.runner import depth
from tapestream.runner.graph import node_names

_DEEP = """
import sys
import torch, tapestream as ts
torch.manual_seed(0)
w = torch.nn.Parameter(torch.eye(4) / 2)

def long(h):
    for _ in range(16_000):
        h = torch.tanh(h @ w)
    return h

def step(h):
    return torch.tanh(h @ w)

class Block(torch.nn.Module):
    def forward(self, h):
        return long(h)

block, x = Block(), torch.randn(2, 4)
runs = {
    "chain": lambda: ts.Chain([long, long], budget=BUDGET)(x),
    "loop": lambda: ts.Loop(step, budget=BUDGET)(x, steps=40_000),
    "opaque": lambda: ts.Program(lambda h: block(h) + 1, budget=BUDGET, opaque=[Block])(x),
}
steps = 40_000 if sys.argv[1] == "loop" else 16_000 * (2 if sys.argv[1] == "chain" else 1)
runs[sys.argv[1]]().sum().backward()
found, w.grad, h = w.grad, None, x
for _ in range(steps):
    h = step(h)
h.sum().backward()
assert torch.equal(found, w.grad)
print("equal")
"""


@pytest.mark.parametrize(
    "way", [pytest.param("chain", marks=pytest.mark.full), "loop", pytest.param("opaque", marks=pytest.mark.full)]
)
def test_deep_graphs_do_not_end_the_process(way: str) -> None:
    code = _DEEP.replace("BUDGET", "2**30")
    done = subprocess.run([sys.executable, "-c", code, way], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_a_loop_that_all_fits_is_stored_in_stages_of_bounded_depth() -> None:
    w = torch.nn.Parameter(torch.eye(4) / 2)
    run = ts.Loop(lambda h: torch.tanh(h @ w), budget=2**30)
    run(torch.randn(2, 4), steps=25_000).sum().backward()
    assert run.plan is not None
    assert run.plan.planner == "store_all"
    assert run.plan.schedule.stages == 8  # three nodes a step as it is watched, half of what may be looked at


def test_a_graph_too_deep_for_a_thread_is_refused_by_name() -> None:
    found: list[BaseException] = []

    def look() -> None:
        h = torch.zeros(1, requires_grad=True)
        for _ in range(depth.SHALLOW + 10):
            h = h + 1
        try:
            node_names([h])
        except GradientError as error:
            found.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert "graph of more than 20000 operations" in str(found[0])
