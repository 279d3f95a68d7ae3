"""`tapestream plan`: whose RAM and disk are assumed, what a disk endures, options without effect, measured machines."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from tapestream.cli import machine_file
from tapestream.cli.app import make_app
from tapestream.cli.hardware import HardwareOptions
from tapestream.cli.told import told
from tapestream.costs import Link, Machine
from tapestream.errors import InputError
from tapestream.ir import Tier

MODEL = ["gpt", "--layers", "6", "--width", "256", "--seq", "128", "--vocabulary", "512"]
TIGHT = [*MODEL, "--budget", "30MiB", "--ram", "20MiB", "--update", "backward"]
UP, DOWN = Link(2.4e10, 1e-5, 2e10, 1e-6), Link(2.3e10, 1e-5, 2e10, 1e-6)
READ, WRITE = Link(9e8, 1e-4), Link(4e8, 1e-4)
BOX = machine_file.MeasuredMachine(
    "cuda",
    Machine(
        {
            (Tier.DISK, Tier.HOST): READ, (Tier.HOST, Tier.DISK): WRITE,
            (Tier.HOST, Tier.DEVICE): UP, (Tier.DEVICE, Tier.HOST): DOWN,
        },
        6e13, "some GPU", 9e11, 4e-6,
    ), 20 * 2**20, 10**9,
)  # fmt: skip


def ask(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "130"}).invoke(make_app(), ["plan", *arguments])


def answered(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = ask(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_ram_and_disk_are_listed_with_whose_they_are() -> None:
    given = ask(*MODEL, "--budget", "40MiB", "--ram", "1GiB", "--disk", "1TB")
    assert "RAM 1.00 GiB (given), disk 931 GiB (given)" in given.stdout
    status, mine = answered(*MODEL, "--budget", "40MiB")
    assert status == 0
    assert mine["assumed"]["ram_nbytes"] == psutil.virtual_memory().total
    assert mine["assumed"]["ram_is"] == mine["assumed"]["disk_is"] == "this machine's"


def test_the_disk_is_this_machines_unless_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return type("", (), {"free": 10 * 2**20})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for words, place in ((TIGHT, Path()), ([*TIGHT, "--folder", str(tmp_path)], tmp_path)):
        status, document = answered(*words)
        assert (status, document["fits"], asked.pop()) == (2, False, place)
        assert document["reason"].endswith("(--disk)") or "disk" in document["reason"]
        assert any("--disk" in change for change in document["changes"])
    status, document = answered(*TIGHT, "--disk", "1GB")
    assert (status, asked) == (0, [])
    assert document["assumed"]["disk_is"] == "given"


def test_what_is_written_is_told_as_the_days_that_a_disk_lasts() -> None:
    status, document = answered(*TIGHT, "--disk", "1GB")
    answer = document["answer"]
    days = 600e12 / answer["disk_written_nbytes_per_day"]
    assert (status, answer["days_of_a_600_tb_ssd"]) == (0, pytest.approx(days))
    assert f"; a 600 TB SSD lasts {days:.3g} days" in ask(*TIGHT, "--disk", "1GB").stdout
    _, document = answered(*MODEL, "--budget", "40MiB", "--ram", "1GiB")
    assert document["answer"]["days_of_a_600_tb_ssd"] is None


def test_a_change_is_named_by_the_option_that_was_given_and_its_room_is_shown() -> None:
    words = [*MODEL, "--budget", "30MiB", "--host-budget", "10MiB", "--home", "host"]
    result = ask(*words)
    assert result.exit_code == 2
    assert "give more there (--host-budget)" in result.stdout
    assert "The least change that fits: --home auto" in result.stdout
    assert "So does: --host-budget 61MiB" in result.stdout
    result = ask(*MODEL, "--budget", "30MiB", "--host-budget", "10MiB", "--disk", "0")
    assert "MiB (with that change)" in result.stdout
    assert "--ram" not in result.stdout.replace("--gpu, --ram or --disk", "")


def test_on_a_cpu_ram_is_the_device() -> None:
    result = ask(*MODEL, "--device", "cpu", "--budget", "2GiB", "--ram", "1GiB")
    assert result.exit_code == 2
    assert "a budget of 2.00 GiB was asked for on a device of 1.00 GiB" in result.stdout
    assert "The least change that fits: --budget 1024MiB" in result.stdout
    told = ask(*MODEL, "--device", "cpu", "--ram", "1GiB").stdout
    assert "disk 3 GB/s in, 2 GB/s out" in told
    assert "100 GFLOP/s, memory 5 GB/s, 10 us an operation" in told


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--device", "cpu", "--link", "1GB/s"], "--link"),
        (["--device", "cpu", "--gpu", "1GiB"], "--gpu"),
        (["--device", "cpu", "--host-budget", "1GiB"], "--host-budget"),
        (["--home", "device", "--host-budget", "1GiB"], "--host-budget"),
        (["--home", "device", "--folder", "."], "--folder"),
        (["--home", "host", "--folder", "."], "--folder"),
        (["--home", "host", "--disk", "1GB"], "--disk"),
        (["--home", "host", "--disk-read", "1GB/s"], "--disk-read"),
        (["--home", "host", "--disk-write", "1GB/s"], "--disk-write"),
        (["--ram", "1GiB", "--host-budget", "1GiB"], "--ram"),
        (["--folder", ".", "--disk", "1GB"], "--folder"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(words: list[str], option: str) -> None:
    result = ask(*MODEL, "--budget", "40MiB", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{option} has no effect with --")
    assert "leave it out" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--home", "device", "--folder", "x"], "--folder has no effect with --home device"),
        (["--home", "device", "--host-budget", "1GB"], "--host-budget has no effect with --home device"),
        (["--device", "cpu", "--home", "host"], "--home host was asked for on the CPU"),
        (["--device", "cpu", "--host-budget", "1GB"], "--host-budget has no effect with --device cpu"),
        (["--home", "disk"], "add --folder path/on/a/fast/disk"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_homes_that_cannot_be_are_refused(command: str, words: list[str], message: str) -> None:
    result = CliRunner().invoke(make_app(), [command, "gpt", "--layers", "2", "--width", "64", *words])
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_a_machine_is_saved_and_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    machine_file.save(path, BOX)
    assert machine_file.load(path) == BOX
    assert [file.name for file in tmp_path.iterdir()] == ["box.json"]
    result = ask(*MODEL, "--budget", "30MiB", "--update", "backward", "--machine", str(path))
    assert result.exit_code == 0, result.output
    assert "link 24 GB/s in, 23 GB/s out, disk 900 MB/s in, 400 MB/s out" in result.stdout
    assert "60 TFLOP/s, memory 900 GB/s, 4 us an operation" in result.stdout
    assert "RAM 20.0 MiB (box.json's), disk 954 MiB (box.json's)" in result.stdout
    found = HardwareOptions(budget="1GiB", machine=path, disk_read="3GB/s", ram="1GiB").found()
    assert (found.device, found.ram.whose) == ("cuda", "given")
    links = found.machine.links
    assert links[Tier.DISK, Tier.HOST] == Link(3e9)
    assert (links[Tier.HOST, Tier.DISK], links[Tier.HOST, Tier.DEVICE]) == (WRITE, UP)
    with pytest.raises(InputError, match="was measured with --device cuda"):
        HardwareOptions(budget="1GiB", machine=path, device="cpu").found()


def test_this_machine_is_measured_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    words = ["machine", "--device", "cpu", "--folder", str(tmp_path), "--save", str(path)]
    result = CliRunner().invoke(make_app(), words)
    assert result.exit_code == 0, result.output
    assert f"plan --machine {path}" in result.stdout.replace("\n", " ")
    found = machine_file.load(path)
    assert (found.device, found.ram_nbytes) == ("cpu", psutil.virtual_memory().total)
    assert set(found.machine.links) == {(Tier.DISK, Tier.DEVICE), (Tier.DEVICE, Tier.DISK)}
    status, document = answered(*MODEL, "--budget", "40MiB", "--machine", str(path))
    assert (status, document["assumed"]["ram_is"]) == (0, "here.json's")


WHOLE = {"format": "tapestream machine 1", "device": "cpu", "machine": {"links": [["DISK", "DEVICE", {
    "bytes_per_second": 1e9}]], "flops_per_second": 1e9, "name": ""}, "ram_nbytes": 1, "disk_free_nbytes": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "tapestream machine 2"}, {"format": "tapestream plan 1"}, {"device": "tpu"}, {"machine": None},
        {"machine": {"links": []}}, {"ram_nbytes": "much"}, {"ram_nbytes": -1}, {"disk_free_nbytes": None}, None,
    ],
)  # fmt: skip
def test_a_file_that_is_no_machine_is_refused_in_a_line(changed: dict[str, Any] | None, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text("[]" if changed is None else json.dumps({**WHOLE, **changed}))
    result = ask(*MODEL, "--budget", "40MiB", "--machine", str(path))
    assert result.exit_code == 2
    assert f"{path} is damaged or no machine of this version" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    path.unlink()
    assert "make one there, with `tapestream machine --save" in ask("--machine", str(path), "--budget", "1GB").stderr


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("home='disk' was asked for; use folder=...", "--home disk was asked for; use --folder"),
        ("let them live in a folder (home=, folder=)", "let them live in a folder (--home, --folder)"),
        ("or name more blocks with blocks=[...]", "or name more blocks with --blocks"),
        ("blocks= names 'x', but there is none", "--blocks names 'x', but there is none"),
        ("or use update='step'", "or use --update step"),
        ("measure_machine: cannot write in here: full", "cannot write in here: full"),
        ("Batches: a sequence of 9 needs 10 bytes", "a sequence of 9 needs 10 bytes"),
        (
            "this schedule reaches 2.00 GiB (2147483648 bytes) in HOST, 1.00 GiB (1073741824 bytes) are allowed; the "
            "peak is at action 3, Offload(1). Allow 2147483648 bytes there, or plan for the smaller budget",
            "the plan takes 2.00 GiB of RAM, and 1.00 GiB are allowed (--host-budget)",
        ),
        (
            "it cannot be planned without running it: use tapestream.plan(model, batch) in Python",
            "it cannot be planned without running it, as `tapestream verify` does",
        ),
        ("layers.0 raised KeyError: x='y'", "layers.0 raised KeyError: x='y'"),
    ],
)  # fmt: skip
def test_messages_name_options(message: str, shown: str) -> None:
    assert told(message) == shown


@pytest.mark.parametrize("lacks", [("--ram", "1MiB"), ("--disk", "0")])
def test_a_larger_device_and_more_room_together_where_neither_alone_is_enough(lacks: tuple[str, str]) -> None:
    option, little = lacks
    given = {"--gpu": "5MiB", "--ram": "1GiB", "--disk": "10GiB", option: little}
    home = ["--home", "disk"] if option == "--disk" else []
    words = ["gpt", "--layers", "6", "--width", "256", "--seq", "128", "--vocabulary", "8192", *home]
    status, document = answered(*words, *(word for pair in given.items() for word in pair))
    (change,) = document["changes"]
    assert (status, change.keys()) == (2, {"--budget", "--gpu", option})
    status, document = answered(*words, *(word for pair in (given | change).items() for word in pair))
    assert (status, document["fits"]) == (0, True)
