"""A disk that is really full or read-only: one line says so, nothing is lost, and training goes on."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("full_disk.py")
SCENARIOS = [one.name for one in ast.parse(CHILD.read_text()).body if isinstance(one, ast.FunctionDef)]
APART = ("unshare", "--user", "--map-root-user", "--mount")
"""With file systems of its own, which needs no rights where the system lets users have namespaces."""


def _can_mount(folder: Path) -> bool:
    mounting = ("mount", "-t", "tmpfs", "none", str(folder))
    return (
        shutil.which("unshare") is not None and not subprocess.run([*APART, *mounting], capture_output=True).returncode
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("disks")
    if not _can_mount(folder):
        pytest.skip("this system lets users mount nothing, not even in a namespace of their own")
    child = subprocess.run(
        [*APART, sys.executable, str(CHILD), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    answer: dict[str, str | None] = json.loads(child.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith(("full_w", "read_only_w"))])
def test_nothing_is_lost(found: dict[str, str | None], name: str) -> None:
    assert found[name] is None, found[name]
