"""What `make dist` makes: the wheel holds the package alone, and works in an empty environment outside of the clone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, from a copy: setuptools writes beside the sources."""
    copy, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy / name)
    found = {}
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", _BUILD, f"build_{kind}", str(made)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found[kind] = made / done.stdout.split()[-1]
    return found


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that holds the wheel; what it needs, it finds in ours."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    site.mkdir(parents=True, exist_ok=True)
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, "--force-reinstall", built["wheel"]], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(*command: object, folder: Path) -> str:
    """What a command prints, in an environment without variables of ours."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_alone(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"tapestream", "tapestream_command.py"}
    assert "tapestream/py.typed" in names
    assert f"Version: {PROJECT['version']}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    for kind in ("Operating System", "Programming Language", "Topic", "Development Status"):
        assert f"Classifier: {kind} :: " in metadata


def test_the_sdist_has_the_sources(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"src/tapestream/__init__.py", "src/tapestream/py.typed", "pyproject.toml", "LICENSE", "README.md"} <= names


def test_the_changelog_has_this_version() -> None:
    dated = rf"^## \[{re.escape(PROJECT['version'])}\] - \d{{4}}-\d\d-\d\d$"
    assert re.search(dated, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import tapestream; print(tapestream.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run(installed / "tapestream", "--version", folder=tmp_path).startswith(f"tapestream {PROJECT['version']},")
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "peak" in run(installed / "python", "-c", snippet, folder=tmp_path)


@pytest.mark.full
def test_the_demo_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "every bit" in run(installed / "tapestream", "demo", "--quick", "--device", "cpu", folder=tmp_path)
