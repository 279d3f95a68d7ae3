"""Two ranks that share one GPU, on gloo: a copy each, and one that is divided, in RAM, on disk and on the GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchrun import in_two_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCRIPT = Path(__file__).with_name("ranks.py")


def test_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "simulated_gpu" in sys.modules:
        monkeypatch.setenv("TAPESTREAM_SIMULATED", "1")
    in_two_processes(SCRIPT, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    assert len(first) == 5
    assert set(first.values()) == {first["plain"]}
