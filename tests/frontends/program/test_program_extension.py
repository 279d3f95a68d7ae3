"""A real C++ extension inside of programs, chains and loops: exact, or refused by name."""

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import tapestream as ts
from tapestream.errors import GradientError

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
AMPLE, TIGHT = 2**26, 2**16
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    made, libraries = tmp_path_factory.mktemp("extension") / "extension.so", cpp_extension.library_paths()[0]
    included = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    source = Path(__file__).with_name("extension.cpp")
    options = ["-O0", "-shared", "-fPIC", "-std=c++20", "-DTORCH_EXTENSION_NAME=extension"]
    subprocess.run([compiler, *options, *included, str(source), "-o", str(made), *linked], check=True)
    spec = importlib.util.spec_from_file_location("extension", made)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reading(made: Any) -> Function:
    return lambda x: x * made.past_torch(x.detach())


def writing(made: Any) -> Function:
    """Into a tensor that a torch call has made."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        made.add_one(y.detach())
        return x * y

    return step


def writing_into_saved(made: Any) -> Function:
    def step(x: torch.Tensor) -> torch.Tensor:
        made.add_one(x.detach())
        return x * 1

    return step


def as_operation(made: Any) -> Function:
    return lambda x: torch.ops.tapestream_extension.square(x)


def with_nodes(made: Any) -> Function:
    return lambda x: made.square(x) + made.twice(x)


def run(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    w = (torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 6).requires_grad_()
    loss = way(torch.ones(32, 32), w)
    loss.backward()
    assert w.grad is not None
    return loss.detach(), w.grad


def ways(extra: Function, budget: int) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The same computation, twelve steps, by every front-end."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return extra(torch.tanh(x @ w))

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = step(x, w)
        return x.square().sum()

    return {
        "plain": plain,
        "program": lambda x, w: ts.Program(lambda: plain(x, w), budget=budget)(),
        "chain": lambda x, w: ts.Chain([lambda x: step(x, w)] * 12, budget=budget)(x).square().sum(),
        "loop": lambda x, w: ts.Loop(lambda x: step(x, w), budget=budget)(x, steps=12).square().sum(),
    }


@pytest.mark.parametrize("budget", [AMPLE, TIGHT])
@pytest.mark.parametrize("kind", [reading, as_operation, with_nodes, writing])
def test_exact_or_refused(extension: Any, kind: Callable[[Any], Function], budget: int) -> None:
    found = ways(kind(extension), budget)
    loss, gradient = run(found["plain"])
    refused = kind is with_nodes or (kind is writing and budget == TIGHT)
    for name, way in found.items():
        if name == "program" and refused:
            with pytest.raises(GradientError, match="without a torch call"):
                run(way)
            continue
        again, same = run(way)
        assert torch.equal(again, loss), name
        assert torch.equal(same, gradient), name


@pytest.mark.parametrize("name", ["program", "chain", "loop"])
def test_a_write_into_what_was_saved_is_refused_as_plain_autograd_does(extension: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"inplace|without a torch call"):
        run(ways(writing_into_saved(extension), AMPLE)[name])
