"""`tapestream plan`: the answer, its JSON, exit status, and that the least change really fits."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tapestream.cli.app import make_app
from tapestream.planning.plan import Plan

MODEL = ["gpt", "--layers", "6", "--width", "256", "--seq", "128", "--vocabulary", "512"]


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plan", *arguments])


def answered(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = ask(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_a_step_that_fits_says_what_it_takes_in_each_tier() -> None:
    status, document = answered(*MODEL, "--budget", "40MiB", "--ram", "1GiB")
    assert status == 0
    assert document["fits"] is True
    assert document["changes"] == []
    assert document["model"] == {
        "name": "gpt", "layers": 6, "width": 256, "heads": 4, "vocabulary": 512, "dtype": "float32",
        "parameters": 6 * (12 * 256**2 + 13 * 256) + 256 * (512 + 128 + 2),
    }  # fmt: skip
    answer = document["answer"]
    tiers = answer["tiers"]
    assert 0 < tiers["device"]["peak_nbytes"] <= tiers["device"]["allowed_nbytes"] == 40 * 2**20
    assert 0 < tiers["host"]["peak_nbytes"] <= 2**30
    assert answer["disk_written_nbytes_per_step"] == 0
    assert answer["tokens_per_second"] == pytest.approx(128 / answer["seconds_per_step"])


def test_a_home_too_large_for_ram_is_on_disk_and_the_writing_is_counted() -> None:
    status, document = answered(*MODEL, "--budget", "30MiB", "--ram", "20MiB", "--update", "backward")
    assert status == 0
    answer = document["answer"]
    assert answer["tiers"]["disk"]["peak_nbytes"] > 0
    assert answer["tiers"]["host"]["peak_nbytes"] <= 20 * 2**20
    written = answer["disk_written_nbytes_per_step"]
    assert written > 0
    assert answer["disk_written_nbytes_per_day"] == pytest.approx(
        written * 86400 / answer["seconds_per_step"], rel=1e-6
    )


def test_what_binds_is_computation_or_all_copies_between_two_tiers() -> None:
    asked = [*MODEL, "--budget", "30MiB", "--ram", "20MiB", "--update", "backward", "--disk-write", "1GB/s"]
    for link, first in (("1GB/s", "RAM to GPU"), ("1000GB/s", "RAM to disk")):
        _, document = answered(*asked, "--link", link, "--disk-read", "900GB/s", "--flops", "100e15")
        answer, bounds = document["answer"], document["answer"]["bounds"]
        assert set(bounds) == {"computation", "RAM to GPU", "GPU to RAM", "disk to RAM", "RAM to disk"}
        written = answer["disk_written_nbytes_per_step"] / 1e9
        assert written < bounds["RAM to disk"] < written + bounds["computation"]  # it waits for the first update
        assert bounds["computation"] == pytest.approx(answer["seconds_per_step"] - answer["waiting_seconds"])
        assert max(bounds, key=bounds.__getitem__) == first
        assert max(bounds.values()) <= 1.001 * answer["seconds_per_step"]
    assert "RAM to disk, " in ask(*asked, "--link", "1000GB/s").stdout


def test_ram_is_home_where_it_holds_what_does_not_stay_on_the_device() -> None:
    asked = [*MODEL, "--budget", "40MiB", "--ram", "40MiB", "--update", "backward"]  # 54 MiB of blocks
    status, document = answered(*asked)
    answer = document["answer"]
    assert status == 0
    assert answer["tiers"]["disk"]["peak_nbytes"] == 0
    assert 0 < answer["tiers"]["host"]["peak_nbytes"] <= 40 * 2**20
    _, on_disk = answered(*asked, "--home", "disk")
    assert on_disk["answer"]["seconds_per_step"] > answer["seconds_per_step"]


@pytest.mark.parametrize(
    "asked",
    [
        {"--budget": "6MiB", "--gpu": "8MiB"},
        {"--budget": "20MiB", "--gpu": "1GiB", "--batch": "16"},
        {"--budget": "2GiB", "--gpu": "1GiB"},
        {"--budget": "40MiB", "--ram": "30MiB", "--disk": "20MiB"},
        {"--budget": "40MiB", "--ram": "4MiB", "--home": "host"},  # leaving out --home is enough
        {"--budget": "6MiB", "--gpu": "8MiB", "--ram": "4MiB", "--disk": "4MiB"},  # all at once
    ],
)
def test_every_change_that_is_offered_fits_when_applied(asked: dict[str, str]) -> None:
    given = {"--ram": "1GiB", **asked}
    status, document = answered(*MODEL, *(word for pair in given.items() for word in pair))
    assert status == 2
    assert document["fits"] is False
    assert document["reason"]
    assert document["changes"]
    for change in document["changes"]:
        changed = {**given, **change}
        assert changed != given
        status, _ = answered(*MODEL, *(word for pair in changed.items() for word in pair))
        assert status == 0, change


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({"--budget": "40MiB", "--ram": "4MiB", "--home": "host"}, {"--home"}),
        ({"--budget": "20MiB", "--gpu": "20MiB", "--home": "device", "--disk": "1TiB"}, {"--home"}),
        ({"--budget": "2MiB", "--gpu": "2MiB", "--ram": "2MiB", "--disk": "2MiB"}, {"--budget", "--gpu", "--ram"}),
        ({"--budget": "2MiB", "--gpu": "2MiB", "--disk": "1TiB"}, {"--budget", "--gpu"}),
    ],
)
def test_what_is_shown_for_a_change_is_what_the_command_says_once_it_is_made(
    asked: dict[str, str], first: set[str]
) -> None:
    given = {"--ram": "1GiB", **asked}
    _, document = answered(*MODEL, *(word for pair in given.items() for word in pair))
    assert not document["fits"]
    change = document["changes"][0]
    assert set(change) == first
    _, then = answered(*MODEL, *(word for pair in {**given, **change}.items() for word in pair))
    for name in ("seconds_per_step", "waiting_seconds", "forwards", "moved_nbytes", "fills"):
        assert then["answer"][name] == document["answer"][name], name
    peaks, shown = ([tier["peak_nbytes"] for tier in one["answer"]["tiers"].values()] for one in (then, document))
    assert peaks == shown


def test_the_text_and_the_advice_name_one_budget() -> None:
    for home in ("auto", "device"):
        given = [*MODEL, "--budget", "2MiB", "--gpu", "2MiB", "--home", home, "--ram", "1GiB"]
        _, document = answered(*given)
        change = next(one for one in document["changes"] if set(one) == {"--budget", "--gpu"})
        assert change["--budget"] == f"{-(-document['least_nbytes'] // 2**20)}MiB"
        assert document["budgets"][0]["nbytes"] >= document["least_nbytes"]


def test_a_smaller_model_is_advised_only_where_no_card_ram_and_disk_would_do() -> None:
    tight = ["--budget", "1MiB", "--gpu", "1MiB", "--ram", "1MiB", "--disk", "1MiB"]
    for home in ([], ["--home", "host"][:2], ["--home", "disk"], ["--home", "device"]):
        given = [*tight[:-2], *home] if home == ["--home", "host"] else [*tight, *home]
        assert "smaller model" not in ask(*MODEL, *given).stdout


def test_half_the_bits_and_shorter_sequences_are_tried() -> None:
    given = [*MODEL, "--ram", "1GiB", "--home", "device", "--seq", "128", "--batch", "1"]
    _, least = answered(*given, "--budget", "1MiB")
    budget = str(least["least_nbytes"] - 2**16)
    _, document = answered(*given, "--budget", budget)
    offered = [set(change) for change in document["changes"]]
    assert {"--dtype"} in offered or {"--seq"} in offered
    assert {"--seq"} in offered


def test_a_smaller_batch_is_the_largest_that_fits() -> None:
    given = [*MODEL, "--budget", "20MiB", "--gpu", "20MiB", "--ram", "1GiB"]
    _, document = answered(*given, "--batch", "16")
    batch = next(int(change["--batch"]) for change in document["changes"] if "--batch" in change)
    assert 1 <= batch < 16
    assert answered(*given, "--batch", str(batch + 1))[0] == 2


@pytest.mark.full  # a minute of planning
def test_gpt3_is_answered_without_allocating_it() -> None:
    status, document = answered("gpt3-175b", "--budget", "12GiB", "--gpu", "12GiB", "--ram", "64GiB", "--disk", "4TB",
        "--dtype", "bf16",
    )  # fmt: skip
    assert document["model"]["parameters"] > 174e9
    assert status == (0 if document["fits"] else 2)
    assert document["answer"]["tiers"]["disk"]["peak_nbytes"] > 2e12


def test_the_tables_name_the_change_and_saved_plans_can_be_read(tmp_path: Path) -> None:
    failed = ask(*MODEL, "--budget", "6MiB", "--ram", "1GiB")
    assert failed.exit_code == 2
    assert "The least change that fits: --" in failed.stdout
    good = ask(*MODEL, "--budget", "40MiB", "--ram", "1GiB", "--save", str(tmp_path / "plan.json"))
    assert good.exit_code == 0
    assert "It fits" in good.stdout
    assert Plan.load(tmp_path / "plan.json").peak_nbytes <= 40 * 2**20


def test_what_runs_beside_the_blocks_is_named() -> None:
    sizes = ("--layers", "3", "--width", "64", "--seq", "16", "--vocabulary", "5000")
    assert "(the largest: Embedding of 1.22 MiB" in ask("gpt", *sizes, "--budget", "1MiB", "--ram", "1GiB").stdout


def test_rates_may_be_written_as_they_are_shown() -> None:
    rates = ("--flops", "60 TFLOP/s", "--link", "24 GB/s", "--disk-read", "500kB/s", "--disk-write", "2GB",
             "--memory-rate", "800GB/s")  # fmt: skip
    result = ask(*MODEL, "--budget", "40MiB", "--ram", "1GiB", *rates)
    assert result.exit_code == 0, result.output
    assert "link 24 GB/s, disk 500 kB/s in, 2 GB/s out" in result.stdout
    assert "60 TFLOP/s, memory 800 GB/s" in result.stdout


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert ask(*MODEL, "--budget", "40MiB", "--ram", "1GiB", "--plot", str(tmp_path / "plan.png")).exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


PLACES = [
    (["--plot", "nodir/x.png"], "there is no folder 'nodir'; create it"),
    (["--plot", "x.docx"], "end its name in one of"),
    (["--compare", "--plot", "nodir/x.png"], "there is no folder 'nodir'"),
    (["--save", "nodir/x.json"], "there is no folder 'nodir'"),
    (["--save", "."], "it is a folder"),
]


@pytest.mark.parametrize(("arguments", "told"), PLACES)
def test_a_place_that_cannot_be_written_is_told_before_anything_is_planned(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tapestream.cli.plan.costs_of", lambda *_: pytest.fail("planning began"))
    result = ask(*MODEL, "--budget", "40MiB", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_file_that_may_not_be_written_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everything
    result = ask(*MODEL, "--budget", "40MiB", "--save", str(tmp_path / "plan.json"))
    assert (result.exit_code, "writing there is not permitted" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["gpt"], "--budget 12GiB"),
        (["gpt", "--budget", "1GiB"], "--layers 24 --width 1024"),
        (["gpt9", "--budget", "1GiB"], "gpt3-175b"),
        (["gpt2-124m", "--layers", "3", "--budget", "1GiB"], "write 'gpt'"),
        ([*MODEL, "--budget", "eight"], "for example '8GiB'"),
        ([*MODEL, "--budget", "1GiB", "--optimizer", "lamb"], "adamw"),
        ([*MODEL, "--budget", "1GiB", "--update", "never"], "backward"),
        ([*MODEL, "--budget", "1GiB", "--dtype", "fp8"], "bf16"),
        ([*MODEL, "--budget", "1GiB", "--flops", "0"], "60TFLOP/s"),
        ([*MODEL, "--budget", "1GiB", "--flops", "60"], "if TFLOP/s are meant, 60T"),
        ([*MODEL, "--budget", "1GiB", "--link", "25"], "if GB/s are meant, 25GB/s"),
        ([*MODEL, "--budget", "1GiB", "--disk-read", "3"], "--disk-read 3 was asked for"),
        ([*MODEL, "--budget", "1GiB", "--folder", "/no/such/folder"], "create it"),
    ],
)
def test_errors_are_one_line_with_advice_and_no_traceback(arguments: list[str], advice: str) -> None:
    result = ask(*arguments)
    assert result.exit_code == 2
    assert advice in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
