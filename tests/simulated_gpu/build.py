"""Compiles the simulated GPU against the installed PyTorch, once for each version of either."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
OUTPUT = Path(__file__).parents[2] / "build" / "simulated_gpu"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fopenmp", "-D_GLIBCXX_USE_CXX11_ABI=1")
# Compiled together: of each unit most of the time goes into PyTorch's headers, which the first needs least of.
UNITS = {
    "host": ("knobs", "clock", "queues", "streams", "generator", "interface"),
    "memory": ("device_memory", "host_memory", "workspaces"),
    "dispatch": ("shadow", "traits", "shapes", "costs", "operators"),
    "kernels": ("kernels", "copies", "recurrent", "attention", "autocast", "hooks"),
}
KINDS = {"cuda": (), "privateuse1": ("-DSIMULATED_PRIVATE",)}


class Unavailable(RuntimeError):
    """This machine or its PyTorch is not one on which a GPU can be simulated."""


class NoCompiler(Unavailable):
    """There is no C++ compiler on this machine."""


class BuildFailed(RuntimeError):
    """The compiler refused the sources."""


def torch_folder() -> Path:
    """Where PyTorch is installed; it is not imported, since the device must be known before."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def build(kind: str = "cuda") -> Path:
    """Return the library that poses as ``kind``, compiled now where it was not before.

    Raises NoCompiler where that is needed and there is no compiler.
    """
    flags = (*FLAGS, *KINDS[kind])
    target = OUTPUT / _digest(flags) / "libsimulated_gpu.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise NoCompiler("the simulated GPU needs a C++ compiler, and there is no g++ on this machine")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock"):
        if not target.exists():  # another process may have built it meanwhile
            _compile(compiler, flags, target)
    return target


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((flags, importlib.metadata.version("torch"), str(torch_folder()))).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Objects are made beside the library, which is renamed into place: a broken build leaves none."""
    torch = torch_folder()
    headers = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [compiler, *flags, f"-I{SOURCES}", *(f"-isystem{folder}" for folder in headers)]
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)

        def compiled(unit: str) -> str:
            source, made = folder / f"unit_{unit}.cpp", folder / f"unit_{unit}.o"
            source.write_text("".join(f'#include "{file}.cpp"\n' for file in UNITS[unit]))
            _run([*command, "-c", str(source), "-o", str(made)])
            return str(made)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, reversed(UNITS)))
        libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
        _run([compiler, "-shared", "-fopenmp", *objects, "-o", str(folder / target.name), *libraries])
        (folder / target.name).rename(target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr}")
