"""The first seconds: help, versions, completion and options that cannot be never import PyTorch."""

import ast
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tapestream as ts
from tapestream import models
from tapestream.cli import checks, loop, train_options
from tapestream.cli.app import make_app
from tapestream.frontends.outlines import optimizers
from tapestream.models import Digits, Shapes
from tapestream.models.shapes import RESNET_SIZES, ResNetConfig

HEAVY = ("torch", "numpy", "scipy", "matplotlib")
CHILD = f"""
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored below what runs in the background
heavy = lambda: os.write(2, repr([name for name in {HEAVY} if name in sys.modules]).encode())
atexit.register(heavy)
sys.argv[:] = ["tapestream", *sys.argv[1:]]
from tapestream_command import main
main()
"""
COMMANDS = ("plan", "explain", "train", "verify", "machine", "clean", "demo")
GPT = ("gpt", "--layers", "2", "--width", "64")


def child(*words: str, **environment: str) -> tuple[int, str, str]:
    """Status and output of the command in a process of its own; its last words on standard error are what is heavy of
    what it has imported."""
    found = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "120", **environment},
    )  # fmt: skip
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], *([command, "--help"] for command in COMMANDS)])
def test_help_and_versions_import_nothing_heavy(words: list[str]) -> None:
    status, out, err = child(*words)
    assert (status, err) == (0 if words else 2, "[]")
    assert "tapestream" in out


def test_completion_is_there_and_imports_nothing_heavy() -> None:
    words = {"COMP_WORDS": "tapestream pl", "COMP_CWORD": "1", "_TAPESTREAM_COMPLETE": "complete_bash"}
    assert child(**words) == (0, "plan\n", "[]")
    words |= {"COMP_WORDS": "tapestream plan --bu", "COMP_CWORD": "2"}
    assert child(**words) == (0, "--budget\n", "[]")
    assert "--install-completion" in child("--help")[1]


def test_the_version_told_is_that_of_pytorch() -> None:
    import torch

    assert child("--version")[1] == f"tapestream {ts.__version__}, PyTorch {torch.__version__}\n"


BAD = [
    ("plan", *GPT, "--budget", "eight"),
    ("plan", *GPT, "--budget", "0"),
    ("plan", *GPT, "--budget", "1GiB", "--flops", "fast"),
    ("plan", *GPT, "--budget", "1GiB", "--link", "25"),
    ("plan", *GPT, "--budget", "1GiB", "--device", "tpu"),
    ("plan", *GPT, "--budget", "1GiB", "--home", "attic"),
    ("plan", *GPT, "--budget", "1GiB", "--dtype", "fp8"),
    ("plan", *GPT, "--budget", "1GiB", "--optimizer", "no_such"),
    ("plan", *GPT, "--budget", "1GiB", "--save", "nodir/plan.json"),
    ("plan", *GPT, "--budget", "1GiB", "--folder", "nodir"),
    ("plan", *GPT, "--budget", "1GiB", "--machine", "nodir/box.json"),
    ("plan", *GPT, "--budget", "1GiB", "--device", "cpu", "--link", "1GB/s"),
    ("plan", "gpt", "--layers", "2", "--width", "65", "--heads", "2", "--budget", "1GiB"),
    ("plan", "gpt9", "--budget", "1GiB"),
    ("plan", "gpt2-124m", "--layers", "12", "--budget", "1GiB"),
    ("plan", "./nodir", "--budget", "1GiB"),
    ("plan", "nomodule:model", "--budget", "1GiB"),
    ("train", *GPT, "--budget", "eight"),
    ("train", *GPT, "--data", "nodir"),
    ("train", *GPT, "--resume"),
    ("train", *GPT, "--rate", "inf"),
    ("train", *GPT, "--save-every", "3"),
    ("train", "resnet", "--layers", "21"),
    ("train", "resnet77"),
    ("train", "dranet", "--layers", "35", "--width", "3"),
    ("verify", *GPT, "--home", "disk"),
    ("verify", *GPT, "--device", "cpu", "--host-budget", "1GiB"),
    ("explain", "function"),
    ("explain", "nomodule:function"),
    ("machine", "--folder", "nodir"),
    ("machine", "--save", "nodir/box.json"),
    ("clean", "nodir"),
    ("demo", "--budget", "eight"),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_options_that_cannot_be_are_told_in_a_line_before_pytorch_is_imported(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = child(*words)
    told, _, imported = err.rpartition("\n")
    assert (status, out, imported) == (2, "", "[]"), err
    assert told
    assert "\n" not in told
    for name in ("ts.", "tapestream.", "_nbytes", "Config", "='", "=..."):
        assert name not in told.replace("tapestream.models", "")


def test_importing_the_package_imports_nothing_heavy_and_its_names_are_there() -> None:
    code = """
import sys, tapestream as ts
more = ("torch", "numpy", "scipy", "typer", "rich", "asyncio", "multiprocessing", "psutil")
print([name for name in more if name in sys.modules])
import tapestream.planners, tapestream.simulate
from tapestream import *
print(planners is ts.planners, "rotor" in ts.planners, simulate is ts.simulate, callable(ts.simulate))
assert set(ts.__all__) <= set(dir(ts))
try:
    ts.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "[]", "True True True True", "module 'tapestream' has no attribute 'nothing'",
    ]  # fmt: skip


@pytest.mark.parametrize("package", [ts, models])
def test_names_come_from_where_type_checkers_are_told(package: object) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())  # type: ignore[attr-defined]
    told = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == package._HOMES  # type: ignore[attr-defined]
    assert set(told) == set(package.__all__)  # type: ignore[attr-defined]


def test_submodules_do_not_take_the_place_of_names() -> None:
    same = {module.name for module in pkgutil.iter_modules(ts.__path__)} & set(ts.__all__)
    assert same == {"planners", "simulate"}
    for name in same:
        assert not isinstance(getattr(ts, name), type(sys))
    assert ts.errors is sys.modules["tapestream.errors"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", [ts, models])
def test_packages_are_pickled_by_name(package: object) -> None:
    """So functions that use them can be sent to other processes by cloudpickle."""
    assert pickle.loads(pickle.dumps(package)) is package


def test_what_is_known_without_pytorch_is_what_pytorch_has() -> None:
    assert tuple(loop._OPTIMIZERS) == checks.OPTIMIZERS
    assert set(optimizers._STATE_TENSORS) == set(checks.OPTIMIZERS)
    assert {"digits": Digits.classes, "shapes": Shapes.classes} == train_options.CLASSES
    assert all(ResNetConfig.named(name).depth > 17 for name in RESNET_SIZES)


def test_the_device_is_known_without_pytorch_where_it_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "torch" / "version.py"
    version.parent.mkdir()
    (version.parent / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "torch")
    found = {}
    for built, text in (("cpu", "None"), ("cuda", "'12.8'")):
        version.write_text(f"__version__ = '9'\ncuda: Optional[str] = {text}\nhip: Optional[str] = None\n")
        found[built] = checks.known_device("auto"), checks.known_device("cpu")
        if built == "cpu":
            with pytest.raises(ts.InputError, match="finds no GPU; use --device cpu"):
                checks.known_device("cuda")
        else:
            assert checks.known_device("cuda") is None
    assert found == {"cpu": ("cpu", "cpu"), "cuda": (None, "cpu")}


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_while_pytorch_is_imported_is_one_line(number: str, tmp_path: Path) -> None:
    """Which modules that are being imported would turn into errors of their own."""
    (tmp_path / "torch.py").write_text(
        f"import os, signal\ntry:\n    os.kill(os.getpid(), signal.{number})\n    print('went on')\n"
        "except BaseException:\n    raise ImportError('torch failed to import')\n"
    )
    path = os.pathsep.join((str(tmp_path), str(Path(ts.__file__).parents[1])))
    found = child("verify", *GPT, PYTHONPATH=path)
    assert found == (128 + getattr(signal, number), "", "stopped\n")


def test_make_app_declares_every_command() -> None:
    assert {command.callback.__name__ for command in make_app().registered_commands if command.callback} == {*COMMANDS}
