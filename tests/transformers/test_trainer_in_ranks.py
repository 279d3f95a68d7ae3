"""Hugging Face's Trainer under torchrun, unmodified: two ranks have the bits that it has by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun import in_two_processes

SCRIPT = Path(__file__).with_name("trained_together.py")


def run(how: str, folder: Path) -> list[Any]:
    """Losses and gradient norms of all steps, and a hash of the weights, of each rank."""
    in_two_processes(SCRIPT, how, folder)
    return [json.loads((folder / f"{how}{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.on_cpu("c10d knows no simulated GPU")
@pytest.mark.parametrize("how", ["divided", pytest.param("streamed", marks=pytest.mark.full)])
def test_the_bits_of_its_own_way(how: str, tmp_path: Path) -> None:
    theirs = run("plain", tmp_path)
    assert len(theirs[0][0]) == 5
    assert theirs[0][1] == theirs[1][1]
    assert run(how, tmp_path) == theirs
