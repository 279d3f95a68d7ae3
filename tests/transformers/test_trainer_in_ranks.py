"""Hugging Face's Trainer under torchrun, unmodified: two ranks have the bits that it has by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun import in_two_processes

SCRIPT = Path(__file__).with_name("trained_together.py")


def said(how: str, folder: Path) -> list[Any]:
    """Losses and gradient norms of all steps, and a hash of the weights, of each rank."""
    return [json.loads((folder / f"{how}{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.on_cpu("c10d knows no simulated GPU")
def test_the_bits_of_its_own_way(tmp_path: Path) -> None:
    in_two_processes(SCRIPT, tmp_path, "plain", "divided", "streamed")
    theirs = said("plain", tmp_path)
    assert len(theirs[0][0]) == 5
    assert theirs[0][1] == theirs[1][1]
    assert said("divided", tmp_path) == theirs
    assert said("streamed", tmp_path) == theirs
