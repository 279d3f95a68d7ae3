"""What needs a process of its own: its end, eight devices, and a backend of another name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_gpu import Simulator

BEGIN = "import simulated_gpu; simulator = simulated_gpu.load({kind!r}); import torch; torch.set_num_threads(1)\n"


def child(program: str, *, kind: str = "cuda", **knobs: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {f"SIMULATED_GPU_{name.upper()}": str(value) for name, value in knobs.items()}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-X", "faulthandler", "-c", BEGIN.format(kind=kind) + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


QUEUED = """
x = torch.ones(1000, device="cuda", requires_grad=True)
torch.cuda._sleep(10**14)  # half a day
for _ in range(100):
    y = (x * 2).sum()
    torch.ones(1000).pin_memory().copy_(x.detach(), non_blocking=True)
y.backward()
torch.cuda.Event().record()
print("end", flush=True)
"""


@pytest.mark.parametrize(("last", "status"), [("", 0), ("raise ValueError('seen')", 1)])
def test_a_process_ends_though_jobs_are_queued(simulator: Simulator, last: str, status: int) -> None:
    ended = child(QUEUED + last)
    assert (ended.returncode, ended.stdout) == (status, "end\n"), ended.stderr
    assert "Fatal" not in ended.stderr


EIGHT = """
x = torch.ones(4, device="cuda:0")
for k in range(1, 8):
    x = x.to(f"cuda:{k}", non_blocking=True) + 1
print(torch.cuda.device_count(), x.device, x.tolist())
"""


def test_eight_devices(simulator: Simulator) -> None:
    ended = child(EIGHT, devices=8, lag=500)
    assert ended.stdout == "8 cuda:7 [8.0, 8.0, 8.0, 8.0]\n", ended.stderr


PRIVATE = """
from torch import nn
import copy
device = torch.accelerator.current_accelerator()
module = torch.get_device_module(device)
print(device, torch.accelerator.device_count(), module.memory_allocated() >= 0)
torch.manual_seed(0)
here = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
there = copy.deepcopy(here).to(device)
for one in (here, there):
    x = torch.ones(8, 16).to(one[0].weight.device)
    nn.functional.cross_entropy(one(x), torch.zeros(8, dtype=torch.long, device=x.device)).backward()
print(all(torch.equal(p.grad, q.grad.cpu()) for p, q in zip(here.parameters(), there.parameters())))
stream, event = torch.Stream(device), torch.Event(device)
host = torch.zeros(100).pin_memory()
with stream:
    number = torch.full((100,), 3.0, device=device)
    host.copy_(number, non_blocking=True)
    event.record()
torch.accelerator.current_stream().wait_event(event)
event.synchronize()
print(host.sum().item(), host.is_pinned(), event.query(), torch.accelerator.memory_allocated() > 0)
module.manual_seed_all(3)
state = module.get_rng_state()
first = torch.rand(3, device=device)
module.set_rng_state(state)
print(torch.equal(first, torch.rand(3, device=device)), module.Stream(), module.Event(enable_timing=True).query())
"""


def test_the_same_device_as_a_backend_of_another_name(simulator: Simulator) -> None:
    ended = child(PRIVATE, kind="privateuse1")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert lines[:3] == ["simulated 2 True", "True", "300.0 True True True"]
    assert lines[3].startswith("True")
