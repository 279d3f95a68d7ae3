"""Two ranks that share one GPU, on gloo: a copy each, and one that is divided, in RAM, on disk and on the GPU. What is
sent runs beside compute, too, as by NCCL."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchrun import in_two_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCRIPT = Path(__file__).with_name("ranks.py")


ASYNCHRONOUS = {"TAPESTREAM_ASYNCHRONOUS": "1"}


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, id="as gloo waits"),
        pytest.param(ASYNCHRONOUS, id="as nccl waits", marks=pytest.mark.full),
        pytest.param(ASYNCHRONOUS | {"SIMULATED_GPU_LAG": "100", "SIMULATED_GPU_POISON": "1"}, id="lag and poison"),
    ],
)
def test_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, str]) -> None:
    if "simulated_gpu" in sys.modules:
        monkeypatch.setenv("TAPESTREAM_SIMULATED", "1")
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    in_two_processes(SCRIPT, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    assert len(first) == 5
    assert set(first.values()) == {first["plain"]}
