"""Everyday training on a device that is not CUDA but a backend of another name gives the bits of plain PyTorch there.

All that `src/tapestream` knows of it is what PyTorch says of any accelerator: there is no entry for it by name.
"""

import os
import subprocess
import sys
from pathlib import Path

from simulated_gpu import Simulator

TESTS = Path(__file__).parents[1]
CHILD = """
import simulated_gpu
simulated_gpu.load("privateuse1")
import torch
import scenarios
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
assert torch.accelerator.current_accelerator() == torch.device("simulated") and not torch.cuda.is_available()
scenarios.LONG //= 10  # how far the host may be ahead is what the same scenarios show on CUDA
found = {name: scenarios.unequal(scenario("simulated:0")) for name, scenario in scenarios.SCENARIOS.items()}
print(len(found) > 0, {name: differences for name, differences in found.items() if differences})
"""


def test_scenarios(simulator: Simulator) -> None:
    """In a process of its own: one process can pose as one kind of device only."""
    folders = (TESTS, TESTS / "gpu", TESTS.parent / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-X", "faulthandler", "-c", CHILD]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "True {}\n"
