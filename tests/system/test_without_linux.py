"""What other systems are promised, where all that they lack is hidden: see `without_linux.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("without_linux.py")


def command(scenario: str, folder: Path) -> list[str]:
    return [sys.executable, "-W", "error::ResourceWarning", str(SCRIPT), scenario, str(folder)]


def test_it_works(tmp_path: Path) -> None:
    """In one process, which first measures an empty folder and imports everything last."""
    done = subprocess.run(command("measures,plans,functions,streams,imports", tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_one_process_s_alone_until_it_is_killed(tmp_path: Path) -> None:
    """That of saves, and a home; what the killed one left is then known as such, and removed."""

    def asked() -> dict[str, Any]:
        done = subprocess.run(command("asks", tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    holder = subprocess.Popen(command("holds", tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdin is not None
        held = json.loads(holder.stdout.readline())
        found = asked()
        assert [f"(process {held['pid']})" in said for said in found["said"]] == [True, True]
        assert found["dead"] == []
        assert os.path.basename(held["home"]) in found["left"]
    finally:
        holder.kill()
        holder.communicate()
    found = asked()
    assert found["said"] == []
    assert found["dead"] == [held["home"]]
    assert [name for name in found["left"] if name.startswith("tapestream-")] == []
