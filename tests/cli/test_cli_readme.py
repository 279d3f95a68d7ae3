"""README.md and docs: results are those of the files, options exist, links lead somewhere. That its Python runs is
tried from the wheel (`test_wheel.py`)."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import ranks_scaling, readme, three_tiers
from benchmarks.headlines import FIRST, HEADLINES, Headline
from benchmarks.memory_over_a_step import PICTURE, mark
from tapestream.cli.app import make_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("tests/**/*.md"),
]
RESULT = {
    "name": "save_speed", "title": "Two", "date": "2025-01-01", "commit": "0123456789abcdef", "machine": "two cores",
    "versions": {"torch": "9.9"}, "rows": [{"what": "a|b", "seconds": 0.12345}, {"what": "c", "times": 12345.6}],
}  # fmt: skip


def test_the_readme_shows_the_results_that_are_there() -> None:
    assert readme.main(["--check"]) == 0


def test_a_result_becomes_a_table() -> None:
    made = readme.page([RESULT])
    assert "2025-01-01, two cores, torch 9.9, commit 0123456789ab" in made
    assert "| what | seconds | times |" in made
    assert "| a\\|b | 0.123 |  |" in made
    assert "| c |  | 12346 |" in made


def test_a_headline_counts_what_is_met_and_what_was_missed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "network": "A",
            "ratio": 0.5,
            "claim": "at most 1",
            "met": "yes",
            "moved claim": "at most 2",
            "moved met": "no",
        },
        {"network": "B", "ratio": 1.25, "claim": "at most 1", "met": "no"},
        {"network": "C", "ratio": 0.75, "claim": "at most 1", "met": "yes"},
        {"network": "D", "ratio": 9.0},
    ]
    lines = {
        "a": Headline("One", "two", "at most 1 times", {"": "ratio"}, others={"moved ": "moves little"}),
        "b": Headline("Two", "nothing", "", {}),
    }
    monkeypatch.setattr(readme, "HEADLINES", lines)
    results = [{**RESULT, "name": "b"}, {**RESULT, "name": "a", "title": "One, (so) to say", "rows": rows}]
    made = readme.headlines(results, page="results.md").splitlines()
    linked, where = "[One](results.md#one-so-to-say)", "2025-01-01, two cores"
    assert (
        made[2] == f"| {linked} | two | 0.75 (0.5 to 1.25) | at most 1 times; moves little | 2 of 3; 0 of 1 | {where} |"
    )
    assert made[3] == f"| [Two](results.md#two) | nothing |  | none |  | {where} |"
    assert len(readme.headlines(results, ["a"]).splitlines()) == 3
    page = readme.page(results)
    assert "| [One](#one-so-to-say) | B | ratio 1.25 | at most 1 |" in page
    assert "| [One](#one-so-to-say) | A |  | moved at most 2 |" in page
    assert page.index("## Claims that were missed") < page.index("## One, (so) to say") < page.index("## Two")


def test_a_section_is_replaced_between_its_marks() -> None:
    made = readme.rewritten(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", "new")
    assert "old" not in made
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert readme.rewritten(made, "new") == made


def test_every_result_has_a_headline_and_at_most_six_columns() -> None:
    names = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert names == set(HEADLINES)
    assert set(FIRST) <= names
    assert len(readme.headlines(readme.load(ROOT / "benchmarks" / "results")).splitlines()[0].split(" | ")) <= 6


def test_the_picture_of_three_tiers_is_that_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "three_tiers.json").read_text(encoding="utf-8"))
    claims = [row["met"] for row in result["rows"] if "claim" in row]
    assert claims == ["yes"] * len(three_tiers.CLAIMS)
    shown = " ".join(three_tiers.PICTURE.read_text(encoding="utf-8").split())
    assert f"<dc:description>{three_tiers.mark(result)}</dc:description>" in shown


def test_the_picture_of_ranks_is_that_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "ranks_scaling.json").read_text(encoding="utf-8"))
    shown = " ".join(ranks_scaling.PICTURE.read_text(encoding="utf-8").split())
    assert f"<dc:description>{three_tiers.mark(result)}</dc:description>" in shown


def test_the_picture_is_that_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "memory_over_a_step.json").read_text(encoding="utf-8"))
    assert f"<dc:description>{mark(result)}</dc:description>" in " ".join(PICTURE.read_text(encoding="utf-8").split())
    peaks = [f"{row['peak MiB']:.0f} MiB in" for row in result["rows"]]
    assert all(peak in README for peak in peaks)


def test_the_guide_shows_a_line_a_model_and_a_column_a_gpu() -> None:
    kind = {"model": "gpt", "dtype": "float32", "tokens": 8, "RAM GiB": 64}
    rows = [
        {**kind, "GPU GiB": 24, "fits": "yes", "s per step": 1.5, "in RAM GiB": 30.0, "on disk GiB": 0.0},
        {**kind, "GPU GiB": 8, "fits": "no", "least GiB": 9.5},
    ]
    made = readme.expectations([RESULT, {**RESULT, "name": "what_to_expect", "rows": rows}]).splitlines()
    assert made[0] == "| a step of | dtype | tokens | RAM | GPU of 8 GiB | GPU of 24 GiB |"
    assert made[2:] == ["| gpt | float32 | 8 | 64 GiB | no: 9.5 GiB needed | 1.5 s, 30 GiB in RAM |"]


@pytest.mark.parametrize("missing", ["rows", "commit", "machine"])
def test_incomplete_results_are_refused(missing: str) -> None:
    cut: dict[str, Any] = {key: value for key, value in RESULT.items() if key != missing}
    with pytest.raises(ValueError, match=missing):
        readme.page([cut])


def test_marks_must_be_there() -> None:
    with pytest.raises(ValueError, match="once each"):
        readme.rewritten("no marks", "")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Within the project: files that exist, headings that are there."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {readme.anchor(heading) for heading in headings}, target


def test_every_option_and_command_in_the_readme_exists() -> None:
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    known = {name: {o for p in command.params for o in p.opts} for name, command in commands.items()}
    shown = re.findall(r"^\$ tapestream (\w+)((?:.*\\\n)*.*)$", COMMANDS, re.MULTILINE)
    assert {name for name, _ in shown} == set(known)
    for name, arguments in shown:
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known[name], name


def test_options_that_are_said_to_be_shared_are_shared_and_extras_exist() -> None:
    commands = get_command(make_app()).commands.values()  # type: ignore[attr-defined]
    said = re.search(r"Options that several commands take.*?`(.*?)`", COMMANDS, re.DOTALL)
    assert said is not None
    for option in said[1].split():
        assert sum(option in {o for p in command.params for o in p.opts} for command in commands) > 1, option
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"tapestream\[([\w,]+)\]", README)
    assert named is not None
    assert set(named[1].split(",")) <= set(extras)


WORLD = """
import torch, tapestream as ts
x = torch.randn(8, 16)
stages = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Sequential(*stages))
weight = torch.nn.Parameter(torch.eye(16))
state = torch.zeros(2, 16)
step = lambda state: torch.tanh(state @ weight)
function = lambda x: torch.tanh(x @ weight).mean()
"""


@pytest.mark.parametrize("cell", re.findall(r"\| (`[^|]*<br>[^|]*`) \|", README))
def test_each_problem_of_the_readme_runs(cell: str) -> None:
    code = cell.replace("<br>", "\n").replace("`", "")
    exec(compile(WORLD + code.replace("1_000_000", "100"), "README.md", "exec"), {})


PLANS = re.findall(r"```\n\$ (tapestream plan gpt(?:[^\n\\]|\\\n)*)\n(.*?)```", COMMANDS, re.DOTALL)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*plan, id=plan[0].split()[2], marks=[pytest.mark.full] if "175b" in plan[0] else [])
        for plan in PLANS
    ],
)
def test_the_plans_shown_are_those_that_are_made(command: str, shown: str) -> None:
    words = command.replace("\\\n", " ").split()[1:]
    found = CliRunner(env={"COLUMNS": "130"}).invoke(make_app(), words)
    assert [line.rstrip() for line in found.output.splitlines()] == shown.splitlines()
