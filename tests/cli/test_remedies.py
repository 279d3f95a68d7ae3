"""What fills the device and what would help, as `tapestream plan` says it."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from tapestream.cli.app import make_app

WIDE = ["gpt", "--layers", "4", "--width", "256", "--vocabulary", "20000", "--seq", "256", "--batch", "8"]
ROOM = ["--ram", "4GiB", "--home", "host"]


def answered(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(make_app(), ["plan", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_what_fills_the_device_adds_up() -> None:
    for budget in ("500MiB", "1GiB"):
        _, document = answered(*WIDE, *ROOM, "--budget", budget)
        answer = document["answer"]
        assert sum(answer["fills"].values()) == answer["tiers"]["device"]["peak_nbytes"]
        assert min(answer["fills"].values()) > 0


def test_logits_that_fill_the_device_are_named_with_their_remedy_which_holds() -> None:
    status, document = answered(*WIDE, *ROOM, "--budget", "700MiB", "--link", "1GB/s")
    assert status == 0
    (found,) = document["remedies"]
    assert found["change"] == {"--loss-chunks": "auto"}
    assert found["seconds"] < document["answer"]["seconds_per_step"]
    _, followed = answered(*WIDE, *ROOM, "--budget", "700MiB", "--link", "1GB/s", "--loss-chunks", "auto")
    assert followed["answer"]["seconds_per_step"] == pytest.approx(found["seconds"])
    assert followed["answer"]["tiers"]["device"]["peak_nbytes"] == found["peak_nbytes"]["device"]
    assert followed["remedies"] == []


def test_where_logits_alone_are_too_much_chunks_are_the_least_change() -> None:
    status, document = answered(*WIDE, *ROOM, "--budget", "200MiB")
    assert status == 2
    assert document["changes"][0] == {"--loss-chunks": "auto"}
    assert answered(*WIDE, *ROOM, "--budget", "200MiB", "--loss-chunks", "auto")[0] == 0
    fills = document["least_fills"]
    assert next(iter(fills)) == "logits and loss"
    assert fills["logits and loss"] > 8 * 256 * 20000 * 4 * 2  # logits and their gradient
    asked = ["plan", *WIDE, *ROOM, "--budget", "200MiB"]
    told = " ".join(CliRunner(env={"COLUMNS": "130"}).invoke(make_app(), asked).stdout.split())
    assert re.search(r"The [\d.]+ MiB that it takes are filled by [\d.]+ MiB logits and loss, [\d.]+ MiB \w", told)


def test_every_remedy_is_tried_when_asked_for_and_holds_when_followed() -> None:
    asked = [*WIDE, *ROOM, "--budget", "700MiB", "--link", "1GB/s"]
    _, document = answered(*asked, "--suggest")
    found = {" ".join(f"{k} {v}" for k, v in one["change"].items()): one for one in document["remedies"]}
    assert {"--loss-chunks auto", "--lora 16", "--update backward"} <= set(found)
    seconds = [one["seconds"] for one in document["remedies"]]
    assert seconds == sorted(seconds)
    for words, one in found.items():
        _, followed = answered(*asked, *words.split())
        assert one["runs"] * followed["answer"]["seconds_per_step"] == pytest.approx(one["seconds"]), words


def test_the_table_is_shown() -> None:
    result = CliRunner(env={"COLUMNS": "130"}).invoke(
        make_app(), ["plan", *WIDE, *ROOM, "--budget", "700MiB", "--link", "1GB/s"]
    )
    assert "fills GPU" in result.stdout
    assert "What would help" in result.stdout
    assert "--loss-chunks auto" in result.stdout


@pytest.mark.parametrize("chunks", ["0", "-1", "many", "2.5"])
def test_chunks_that_are_none(chunks: str) -> None:
    result = CliRunner().invoke(make_app(), ["plan", *WIDE, "--budget", "1GiB", "--loss-chunks", chunks])
    assert result.exit_code == 2
    assert f"--loss-chunks {chunks} was asked for; it is auto, or how many chunks" in result.stderr
