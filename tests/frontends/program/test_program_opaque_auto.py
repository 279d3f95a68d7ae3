"""``opaque="auto"`` takes repeated blocks as one operation each; compiled modules are so in any case, and what else is
compiled is refused by name."""

import copy
import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_program_opaque import Block, Net, check, image
from test_program_transformers import family, tight, traced
from torch import nn

from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.program.program import Program
from tapestream.storage.meter import track_memory

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # while torch compiles
Way = Callable[[nn.Module], Callable[..., Any]]


class Solver:
    """Not a module, but holds one."""

    def __init__(self, net: nn.Module) -> None:
        self.nets = {"net": net}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets["net"](x) * 2  # type: ignore[no-any-return]

    __call__ = step


def nested(net: nn.Module) -> Callable[..., Any]:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return net(x)  # type: ignore[no-any-return]

    return lambda x: inner(x).square()


WAYS: dict[str, Way] = {
    "module": lambda net: net,
    "method": lambda net: net.forward,
    "closure": nested,
    "partial": lambda net: functools.partial(lambda model, x: model(x), net),
    "default": lambda net: lambda x, model=net: model(x),
    "list": lambda net: (lambda nets: lambda x: sum(one(x) for one in nets))([net]),
    "object": Solver,
    "method of an object": lambda net: Solver(net).step,
}


@pytest.mark.parametrize("way", WAYS)
def test_repeated_blocks_are_found_however_the_function_reaches_them(way: str) -> None:
    function, operations = WAYS[way](Net()), []
    for opaque in ((), [Block], "auto"):
        program = Program(function, budget="1MiB", opaque=opaque)
        program(image()).backward()
        assert program.report is not None
        operations.append(program.report.operations)
    assert operations[1] == operations[2] < operations[0]


def test_blocks_found_have_the_bits_of_plain_pytorch() -> None:
    program = check(Net(), "auto")
    assert program.report is not None
    assert program.report.operations == 2 * 8 + 2


def test_blocks_given_objects_are_single_operations() -> None:
    class Scale:
        by = 0.5

    class Given(Block):
        def forward(self, x: torch.Tensor, scale: Any = 1.0, *, skip: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, scale.by if isinstance(scale, Scale) else scale, skip=skip)

    net = Net(Given)

    def program(x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(net.blocks):
            x = block(x, Scale() if k % 2 else 0.5)
        return x.square().mean()

    with pytest.raises(InputError, match="object of type Scale"):
        Program(program, budget="1MiB", opaque=[Given])(image())
    run = Program(program, budget="1MiB", opaque="auto")
    torch.manual_seed(0)
    run(image()).backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.manual_seed(0)
    program(image()).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, net.parameters(), strict=True) if a is not None)
    assert run.report is not None
    assert run.report.operations > 4 + 4 * 4


@pytest.mark.thinned(4)
@pytest.mark.parametrize("more", [1.0, 1.3])
def test_the_backward_of_a_whole_block_fits(more: float) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.conv(x))) + x

    torch.manual_seed(0)
    net, x = nn.Sequential(*(Residual() for _ in range(10))), torch.randn(4, 16, 16, 16)
    with pytest.raises(BudgetError) as error:
        Program(net, budget=1, opaque="auto")(x)
    assert error.value.least_nbytes is not None
    program = Program(net, budget=int(more * error.value.least_nbytes), opaque="auto")
    gradients = sum(p.nbytes for p in net.parameters())
    for _ in range(4):
        net.zero_grad()
        gc.collect()
        with track_memory() as meter:
            program(x).sum().backward()
        assert meter.peak_nbytes - gradients - x.nbytes <= 1.05 * (program.budget.device_nbytes or 0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "times"), [("gpt2", 2.8), ("bert", 2.8), ("vit", 2.8), ("resnet", 1.6)])
def test_families(name: str, times: float) -> None:
    model, batch = family(name, True)
    before = copy.deepcopy(model.state_dict())
    wanted = [traced(model, model, batch(k), k) for k in range(2)]
    budget = int(times * tight(model, batch(0), 0.3))
    model.load_state_dict(before)
    run = Program(model, budget=budget, opaque="auto")
    for k in range(2):
        for a, b in zip(traced(run, model, batch(k), k), wanted[k], strict=True):
            assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
        assert run.report is not None
        assert run.report.reruns > 0


def blocks(compiling: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*map(compiling, parts))


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


def vector() -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compiling", [functools.partial(torch.compile, backend="aot_eager"), compiled_in_place])
def test_compiled_modules_need_not_be_named(compiling: Callable[[Any], Any]) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks(compiling)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) + x).square().sum()

    program = check(Sum(), (), lambda: (vector(),))
    assert program.report is not None
    assert program.report.operations == 6 + 3


def test_compiled_functions_are_refused_by_name() -> None:
    torch._dynamo.reset()
    weight = torch.randn(16, 16, requires_grad=True)
    compiled = torch.compile(lambda x: torch.tanh(x @ weight), backend="aot_eager")

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return compiled(x).detach()  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    x = vector().requires_grad_()
    for function in (lambda x: compiled(x).sum(), compiled, lambda x: Inside.apply(x).sum()):
        with pytest.raises(GradientError, match=r"function or module compiled by it, is called inside"):
            Program(function, budget="1MiB")(x)
    wanted = torch.autograd.grad(compiled(x).sum(), weight)[0]  # works as before

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return compiled(x)  # type: ignore[no-any-return]

    module = Module()
    module.register_parameter("weight", nn.Parameter(weight.detach()))
    value = Program(lambda x: module(x, weight).sum(), budget="1MiB", opaque=[Module])(x)
    assert torch.equal(torch.autograd.grad(value, weight)[0], wanted)


@pytest.mark.parametrize("stances", [("force_eager", "default"), ("default", "force_eager")])
def test_another_graph_in_the_replay_is_refused_by_name(stances: tuple[Any, Any]) -> None:
    """It saves the same tensors in another order: w @ x as x and w, or as w and x."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight @ x

    torch._dynamo.reset()
    torch.manual_seed(0)
    products = [torch.compile(Product(), backend="aot_eager") for _ in range(8)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for product in products:
            x = torch.tanh(product(x))
        return x

    x = torch.randn(16, 16, requires_grad=True)
    program = Program(run, budget=12 * x.nbytes, planner="revolve")
    with torch.compiler.set_stance(stances[0]):
        loss = program(x).sum()
        wanted = torch.autograd.grad(run(x).sum(), x)[0]
    assert program.report is not None
    assert program.report.reruns > 0
    with torch.compiler.set_stance(stances[1]), pytest.raises(GradientError, match="ran another graph of it"):
        loss.backward()
    del loss
    gc.collect()  # what was raised refers to it
    with torch.compiler.set_stance(stances[0]):
        assert torch.equal(torch.autograd.grad(program(x).sum(), x)[0], wanted)


def test_another_thread_that_compiles_changes_nothing() -> None:
    torch._dynamo.reset()
    compiles, ended, given = threading.Event(), threading.Event(), {}

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * given["mask"]  # of the program, and not handed in

    def slow(graph: Any, _: Any) -> Any:
        compiles.set()
        ended.wait(60)
        return graph

    def reading(x: torch.Tensor) -> torch.Tensor:
        given["mask"] = x.detach() + 1
        return reads(x).sum()

    reads, net, x = Reads(), blocks(functools.partial(torch.compile, backend="aot_eager")), vector()
    program = Program(lambda x: net(x).sum(), budget="1MiB")
    program(x).backward()
    other = threading.Thread(target=lambda: torch.compile(lambda z: z.sin() + 1, backend=slow)(torch.randn(3)))
    other.start()
    try:
        assert compiles.wait(60)
        assert torch.compiler.is_compiling()  # of the whole process
        program(x).backward()
        with pytest.raises(GradientError, match="leaf module Reads uses a tensor"):
            Program(reading, budget="1MiB", opaque=[Reads])(x.requires_grad_())
    finally:
        ended.set()
        other.join()


def test_compiling_for_the_first_time_inside_is_refused_by_name() -> None:
    script = """
import sys, torch, tapestream as ts
def run(x):
    return torch.compile(lambda x: torch.tanh(x), backend="eager")(x).sum()
assert "torch._dynamo" not in sys.modules
before = torch.compile
try:
    ts.Program(run, budget="1MiB")(torch.ones(4, requires_grad=True))
except ts.GradientError as error:
    assert "torch.compile, or a function" in str(error), error
else:
    raise AssertionError
assert torch.compile is before
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr


def test_blocks_that_are_given_lists_are_single_operations() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            seen.append(torch.tanh(self.linear(x)))
            return x + seen[-1]

    parts = nn.ModuleList(Appends() for _ in range(4))

    def run(x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for part in parts:
            x = part(x, seen)
        return x.sum() + torch.stack(seen).square().sum()

    Program(run, budget="1MiB", opaque="auto")(vector()).backward()
    found = [p.grad for p in parts.parameters()]
    parts.zero_grad()
    run(vector()).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, parts.parameters(), strict=True) if a is not None)


def test_one_module_that_is_a_container_and_other_words() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    program = Program(lambda x: net(x).sum(), budget="1MiB", opaque=net)
    program(vector()).backward()
    assert program.report is not None
    assert program.report.operations == 2
    with pytest.raises(InputError, match=r"opaque is .auto., or holds modules .* not 'Block'"):
        Program(net, budget="1MiB", opaque="Block")  # type: ignore[arg-type]


def test_a_copy_takes_the_blocks_of_the_copy() -> None:
    program = Program(Net(), budget="1MiB", opaque="auto")
    again = copy.deepcopy(program)
    for one in (program, again):
        torch.manual_seed(0)
        one(image()).backward()
    assert program.report is not None
    assert again.report is not None
    assert program.report.operations == again.report.operations == 2 * 8 + 2
