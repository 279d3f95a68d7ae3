"""A model larger than the memory that its process may take evaluates and generates, where plain PyTorch fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stream_limits import ENVIRONMENT, MIB

pytest.importorskip("transformers", reason="the model that generates is Hugging Face's")
import forward

LAYERS, WIDTH = 12, 512
BUDGET = 48 * MIB
ALLOWED = BUDGET + 32 * MIB


def child(folder: Path, streamed: bool) -> dict[str, Any]:
    job = {
        "layers": LAYERS, "width": WIDTH, "budget": BUDGET, "streamed": streamed, "allowed": ALLOWED,
        "weights": str(folder / "weights"), "folder": str(folder / "home"),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("forward.py")), json.dumps(job)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def one_thread() -> Any:
    """As in the children."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_evaluation_and_generation_under_a_hard_limit_where_plain_pytorch_fails(
    tmp_path: Path, one_thread: None
) -> None:
    """157 MiB of parameters in 48 MiB, and 32 MiB for the rest of the process."""
    forward.save(LAYERS, WIDTH, tmp_path / "weights")
    forward.save(2, WIDTH, tmp_path / "weights-small")
    plain = forward.LlamaForCausalLM.from_pretrained(tmp_path / "weights").eval()
    assert sum(p.nbytes for p in plain.parameters()) > 1.9 * ALLOWED
    failed = child(tmp_path, streamed=False)
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    found = child(tmp_path, streamed=True)
    assert "failed" not in found, found
    assert found.pop("resident") < ALLOWED
    assert found == forward.use(plain)
    assert not any((tmp_path / "home").iterdir()), "the home must go with the process"
