"""Two revisions are timed in turn, each by its own source, and whatever stops that is said in a line."""

import importlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAME = "everything_fits"


def _missing() -> str:
    """Why the revision at hand cannot be had here, or nothing."""
    if shutil.which("git") is None:
        return "there is no git"
    if not (ROOT / ".git").exists():
        return "this is no git repository, as in a source archive"
    asked = ["git", "rev-parse", "--verify", "--quiet", "HEAD^{commit}"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, check=False)
    return "git does not show the history" if found.returncode else ""


with_history = pytest.mark.skipif(bool(_missing()), reason=_missing() or "there is a history")


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark; what it writes for a while lies in an empty folder."""
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "for a while").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "for a while"))
    return importlib.import_module("benchmarks.against")


@with_history
def test_a_revision_beside_itself(against: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["HEAD", NAME, "--quick", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["settings"]["revision"] == against.revision_of("HEAD")
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert row["benchmark"] == NAME
        assert row["ms"] > 0
        assert row["least"] <= row["ratio"] <= row["most"]
    assert found["settings"]["revision"] in capsys.readouterr().out
    assert not list((tmp_path / "for a while").glob("against-*"))


@with_history
def test_each_side_has_its_own_source(against: Any, tmp_path: Path) -> None:
    for source in against.sources_in(tmp_path, "HEAD"):
        assert (source / "tapestream" / "__init__.py").is_file()
    shutil.rmtree(tmp_path / "old")
    side = against.Side("HEAD", tmp_path / "old" / "src", NAME, True)
    with side, pytest.raises(against.Refused, match=r"with HEAD: (ImportError: tapestream comes|ModuleNotFound)"):
        side.next()


@with_history
def test_an_interruption_leaves_nothing_behind(
    against: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        assert list((tmp_path / "for a while").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(against, "compared", interrupted)
    assert against.main(["HEAD", NAME, "--quick"]) == 130
    assert capsys.readouterr().err == "against: interrupted, with 0 rows complete\n"
    assert not list((tmp_path / "for a while").iterdir())


@with_history
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-revision", NAME], "'no-such-revision' is no revision of this repository"),
        (["HEAD", "nothing"], "no steps of nothing can be compared; there are: everything_fits, "),
        (["HEAD", NAME, "--rounds", "0"], "0 rounds were asked for"),
        (["HEAD", NAME, "--out", "no/such/folder/found.json"], "there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    against: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert against.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"against: {said}")


@pytest.mark.parametrize(("most", "status"), [(["--most", "1.02"], 1), (["--most", "1.2"], 0), ([], 0)])
@with_history
def test_a_ratio_above_the_most_is_a_failure(
    against: Any, monkeypatch: pytest.MonkeyPatch, most: list[str], status: int
) -> None:
    found = against.Found(([0.11, 0.3, 0.11], [0.1, 0.1, 0.1]), ({"a"}, {"b"}))
    row = found.row(NAME, "some")
    assert (row["ratio"], row["least"], row["most"], row["plan before"]) == (1.1, 1.1, 3.0, "b")
    monkeypatch.setattr(against, "compared", lambda *_: [row])
    assert against.main(["HEAD", NAME, "--quick", *most]) == status
