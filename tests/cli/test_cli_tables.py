"""`tapestream plan --tables`: embeddings that stay off the device."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tapestream.cli.app import make_app

SOURCE = """
import torch
from torch import nn

class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(40_000, 256, sparse=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))

    def forward(self, items):
        x = self.items(items)
        for layer in self.layers:
            x = layer(x)
        return x.mean()

def made():
    return Items(), torch.randint(40_000, (8, 16))
"""
TABLE = 40_000 * 256 * 4


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "items_model.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def ask(*words: str) -> tuple[int, dict[str, Any] | str]:
        words = ("plan", "items_model:made", "--optimizer", "sgd", *words)
        result = CliRunner().invoke(make_app(), [*words, "--json"])
        found = result.stdout if result.stdout.startswith("{") else ""
        return result.exit_code, json.loads(found) if found else result.stderr

    return ask


def test_a_refusal_names_the_table_and_that_works_when_followed(ask: Any) -> None:
    room = "--budget", "16MiB", "--ram", "4GiB"
    status, document = ask(*room)
    assert status == 2
    change = document["changes"][0]
    assert change == {"--tables": "items"}
    status, document = ask(*room, "--tables", "items")
    assert status == 0
    tiers = document["answer"]["tiers"]
    assert tiers["host"]["peak_nbytes"] >= TABLE
    assert tiers["device"]["peak_nbytes"] <= 16 * 2**20


def test_on_the_cpu_the_table_is_on_the_disk(ask: Any) -> None:
    status, document = ask("--device", "cpu", "--budget", "16MiB", "--disk", "1GiB", "--tables", "items")
    assert status == 0
    assert document["answer"]["tiers"]["disk"]["peak_nbytes"] >= TABLE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tables", "layers.0.0"), "only the rows of an nn.Embedding"),
        (("--tables", "nothing"), "has no module or class of that name"),
    ],
)
def test_other_names_are_refused(ask: Any, words: tuple[str, ...], said: str) -> None:
    status, error = ask("--budget", "1GiB", *words)
    assert status != 0
    assert said in error


def test_ram_that_the_table_does_not_fit_is_named(ask: Any) -> None:
    status, document = ask("--budget", "16MiB", "--ram", "32MiB", "--disk", "1GiB", "--tables", "items")
    assert status == 2
    assert "the tables" in json.dumps(document)
