"""`tapestream plan --ranks`: several GPUs that divide a model's blocks among them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torchrun import in_two_processes
from typer.testing import CliRunner

from tapestream.cli.app import make_app

GPT = "--layers 8 --width 1024 --heads 8 --vocabulary 1024 --batch 2 --seq 256 --dtype bf16 --update backward"
ROOM = "--budget 300MiB --gpu 1GiB --ram 8GiB --flops 20e12"
BLOCK = (12 * 1024**2 + 13 * 1024) * 2  # bytes of a block's weights


def told(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["plan", "gpt", *GPT.split(), *ROOM.split(), *words])
    plain = re.sub(r"[^\w .,;:'()%/-]+", " ", result.output)
    return result.exit_code, " ".join(plain.split())


def asked(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(make_app(), ["plan", "gpt", *GPT.split(), *ROOM.split(), *words, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document["answer"]


@pytest.fixture(scope="module")
def answers() -> dict[int, dict[str, Any]]:
    return {ranks: asked(*(["--ranks", str(ranks)] if ranks > 1 else [])) for ranks in (1, 2, 4)}


def test_a_machine_holds_one_model_however_many_gpus_it_has(answers: dict[int, dict[str, Any]]) -> None:
    alone = answers[1]["tiers"]["host"]["peak_nbytes"]
    for ranks in (2, 4):
        assert ranks * answers[ranks]["tiers"]["host"]["peak_nbytes"] == pytest.approx(alone, rel=0.15)
        assert answers[ranks]["ranks"] == answers[ranks]["shards"] == ranks


def test_tokens_are_those_of_all_gpus(answers: dict[int, dict[str, Any]]) -> None:
    for ranks, answer in answers.items():
        assert answer["tokens_per_second"] == pytest.approx(ranks * 2 * 256 / answer["seconds_per_step"])


def test_a_rank_fetches_its_share_and_gets_the_rest_from_others() -> None:
    """With so little room that each block comes for each forward and backward: no more, as weights are kept between."""
    answer = asked("--ranks", "4", "--peers", "10GB/s", "--link", "10GB/s")
    own, others = answer["bounds"]["RAM to GPU"] * 10e9, answer["bounds"]["copies between ranks"] * 10e9
    # Gathered once to twice, and a sum of the gradient: three quarters of a block each time; what lies outside is less.
    assert 2 * 8 * 0.75 * BLOCK <= others <= 3.2 * 8 * 0.75 * BLOCK
    # Weights once to twice, fp32 masters and two moments once: a quarter of a block's.
    assert own <= 1.1 * 8 * (2 + 6) * BLOCK / 4


def test_machines_that_replicate_hold_the_model_each() -> None:
    shared = asked("--ranks", "8", "--machines", "2", "--network", "100GB/s")
    each = asked("--ranks", "8", "--machines", "2", "--network", "100GB/s", "--replicate")
    assert (shared["shards"], each["shards"]) == (8, 4)
    assert each["tiers"]["host"]["peak_nbytes"] == pytest.approx(2 * shared["tiers"]["host"]["peak_nbytes"], rel=0.2)


@pytest.mark.parametrize("network", ["50GB/s", "1GB/s"])
def test_both_ways_are_told_and_are_what_comes_when_followed(network: str) -> None:
    ways = [asked("--ranks", "4", "--machines", "2", "--network", network, *way) for way in ([], ["--replicate"])]
    share, replicate = (answer["seconds_per_step"] for answer in ways)
    for answer in ways:
        assert answer["seconds_machines"] == pytest.approx({"share": share, "replicate": replicate})
    _, said = told("--ranks", "4", "--machines", "2", "--network", network)
    assert "all share one model; where each has the whole (--replicate) a step:" in said


def test_a_slow_network_costs_time_only_where_it_is_passed() -> None:
    fast, slow = (
        asked("--ranks", "4", "--machines", "2", "--peers", "100GB/s", "--network", rate)["seconds_per_step"]
        for rate in ("50GB/s", "1GB/s")
    )
    assert slow > 2 * fast


def test_the_table_says_whose_bytes_these_are() -> None:
    status, said = told("--ranks", "4", "--machines", "2", "--replicate")
    assert status == 0
    assert "2 ranks together" in said
    assert "by 2 machines of 2 GPUs, each with all shards" in said
    assert "other ranks 25 GB/s" in said


def test_what_does_not_fit_is_said_of_the_machine_and_works_when_followed() -> None:
    status, said = told("--ranks", "2", "--ram", "64MiB", "--disk", "1MiB")
    assert status == 2
    assert "2 GPUs and RAM, disk have" in said
    found = re.search(r"The least change that fits: (--ram|--disk) (\w+)", said)
    assert found is not None
    changed = ["--ram", "64MiB", "--disk", "1MiB"]
    changed[changed.index(found[1]) + 1] = found[2]
    assert told("--ranks", "2", *changed)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machines", "2"), "--machines has no effect with one GPU; leave it out, or add --ranks"),
        (("--replicate",), "--replicate has no effect with one GPU"),
        (("--peers", "8GB/s"), "--peers has no effect with one GPU"),
        (("--ranks", "2", "--network", "8GB/s"), "--network has no effect with one machine"),
        (("--ranks", "2", "--replicate"), "--replicate has no effect with one machine"),
        (("--ranks", "3", "--machines", "2"), "each machine has as many GPUs: give --ranks 4"),
        (("--ranks", "2", "--machines", "2", "--peers", "8GB/s"), "no effect with one GPU in each machine"),
        (("--ranks", "2", "--peers", "8"), "--peers 8 was asked for"),
        (("--ranks", "0"), "--ranks"),
    ],
)
def test_options_that_cannot_be_are_one_line(words: tuple[str, ...], said: str) -> None:
    status, found = told(*words)
    assert status == 2
    assert said in found
    assert "Traceback" not in found


@pytest.mark.parametrize("how", [[], ["--shard"]])
def test_verify_under_torchrun_compares_what_all_processes_do(how: list[str]) -> None:
    shape = "--layers 3 --width 32 --heads 2 --vocabulary 64 --batch 2 --seq 8 --steps 1 --device cpu --json"
    script = Path(__file__).parent / "verified_together.py"
    found = json.loads(in_two_processes(script, "verify", "gpt", *shape.split(), *how))
    assert (found["ranks"], found["equal"], len(found["steps"])) == (2, True, 1)
