"""Embeddings and heads come and go, or stay: what is not tried would not have been faster."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tapestream.cli.app import make_app
from tapestream.frontends.module.plans.divide import Division

MODEL = "plan gpt --layers 24 --width 1024 --vocabulary 8000 --dtype bf16 --batch 4 --seq 1024 --update backward"


def seconds(words: str) -> float:
    result = CliRunner().invoke(make_app(), words.split())
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return float(document["answer"]["seconds_per_step"])


@pytest.mark.parametrize(("ram", "decided"), [(1, [True]), (3, [False])])
def test_guests_that_stay_are_left_out_only_where_they_gain_hardly_anything(
    ram: int, decided: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a disk takes hides what could be gained."""
    asked = f"{MODEL} --ram {ram}GiB --disk 1TiB --disk-write 500MB/s --budget 2GiB --json"
    found, left_out = seconds(asked), list[bool]()
    decide = Division._hardly_slower
    monkeypatch.setattr(Division, "_hardly_slower", lambda self, tight: left_out.append(decide(self, tight)))
    both = seconds(asked)
    assert both <= found <= 1.0051 * both
    assert left_out == decided
