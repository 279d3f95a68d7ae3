"""What somebody changes between a call and its backward, or around one of them, reaches no recompute: it is refused by
name, or what surrounded the call surrounds the recompute."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.runner.modes import Surroundings

WIDTH, SCALE = 32, {"by": 1.5}
FRONTS = ("chain", "join", "loop", "stream")
Run = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Reads a buffer, a number, a global dictionary, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.frozen + self.shift * self.factor
        return x + self.drop(self.act(x)) * self.factor * SCALE["by"]


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _blocks(front: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(1 if front == "loop" else 6)]


def _plain(front: str, blocks: list[nn.Module]) -> Run:
    if front == "loop":
        return lambda x: functools.reduce(lambda h, _: blocks[0](h), range(12), x)
    if front == "join":
        return lambda x: Net(blocks[:3])(x) + Net(blocks[3:])(x)
    return Net(blocks)


def _ours(front: str, blocks: list[nn.Module], budget: int) -> Run:
    if front == "loop":
        run = ts.Loop(blocks[0], budget=budget)
        return lambda x: run(x, steps=12)
    if front == "join":
        joined = ts.Join([blocks[:3], blocks[3:]], lambda a, b: a + b, budget=budget)
        return lambda x: joined(x, x)
    if front == "stream":
        return ts.stream(Net(blocks), device="cpu", budget=budget, home="device", blocks=blocks)
    return ts.Chain(blocks, budget=budget)


def _step(
    front: str, make: Callable[[str, list[nn.Module]], Run], around: Any, between: Any, back: Any
) -> list[Tensor | None]:
    blocks = _blocks(front)
    run = make(front, blocks)
    torch.manual_seed(1)
    x = torch.randn(16, WIDTH, requires_grad=True)
    with around():
        loss = run(x).square().mean()
    between(blocks)
    with back():
        loss.backward()  # type: ignore[no-untyped-call]
    leaves = [x, *(p for block in blocks for p in block.parameters() if p.requires_grad)]
    return [loss.detach(), *(None if leaf.grad is None else leaf.grad.clone() for leaf in leaves)]


def _least(
    front: str, around: Any, between: Any, back: Any, prepare: Callable[[list[nn.Module]], None] | None = None
) -> list[Tensor | None]:
    """Within the least budget, where all that may be is recomputed."""
    budget = 1

    def make(front: str, blocks: list[nn.Module]) -> Run:
        if prepare is not None:
            prepare(blocks)
        return _ours(front, blocks, budget)

    while True:
        try:
            return _step(front, make, around, between, back)
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes <= budget:
                raise
            budget = error.least_nbytes


def _nothing(blocks: list[nn.Module]) -> None:
    return None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "'training'": lambda block: block.eval(),
    "'p'": lambda block: setattr(block.drop, "p", 0.6),
    "'factor'": lambda block: setattr(block, "factor", 2.0),
    "a module or parameter": lambda block: setattr(block, "act", nn.Sigmoid()),
    "buffer or frozen parameter": lambda block: block.shift.add_(1),
    "or frozen parameter": lambda block: block.frozen.mul_(2),
    "captured": lambda block: SCALE.update(by=3.0),
}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_between_is_refused_by_name(front: str, what: str) -> None:
    def between(blocks: list[nn.Module]) -> None:
        with torch.no_grad():
            for block in blocks:
                CHANGES[what](block)

    try:
        with pytest.raises(GradientError, match=r"changed (between the call|after this forward)") as refused:
            _least(front, contextlib.nullcontext, between, contextlib.nullcontext)
    finally:
        SCALE["by"] = 1.5
    assert what in str(refused.value) or "the parameters of" in str(refused.value)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("when", ["added after the call", "there for the call"])
def test_recomputes_have_the_hooks_that_the_call_had(front: str, when: str) -> None:
    """Libraries register some for the time of a call, which take arguments by name."""
    handles = list[Any]()

    def prepare(blocks: list[nn.Module]) -> None:
        if when == "there for the call":
            double: Any = lambda module, given, named: ((given[0] * 2,), named)  # noqa: E731
            acts: list[Any] = [block.act for block in blocks]
            handles[:] = [act.register_forward_pre_hook(double, with_kwargs=True) for act in acts]

    def between(blocks: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        if when == "added after the call":
            for block in blocks:
                block.act.register_forward_hook(lambda module, given, out: out * 2)

    def plain(front: str, blocks: list[nn.Module]) -> Run:
        prepare(blocks)
        return _plain(front, blocks)

    around = (contextlib.nullcontext, between, contextlib.nullcontext)
    for wanted, found in zip(_step(front, plain, *around), _least(front, *around, prepare), strict=True):
        assert wanted is None if found is None else wanted is not None and torch.equal(wanted, found)


@pytest.mark.parametrize("front", FRONTS)
def test_what_was_set_back_does_not_matter(front: str) -> None:
    def between(blocks: list[nn.Module]) -> None:
        for block in blocks:
            block.eval()
            with torch.no_grad():
                block(torch.ones(WIDTH))  # validation
            block.train()

    args = (contextlib.nullcontext, between, contextlib.nullcontext)
    _assert_same(_least(front, *args), _step(front, _plain, *args))


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.1 if func is torch.tanh else found


class _Sines(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.sin.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _scaled() -> contextlib.AbstractContextManager[None]:
    # What is saved for backward in plain PyTorch was saved before.
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.5, lambda t: t)


AROUND: dict[str, tuple[Any, Any]] = {
    "function mode around the call": (_Doubling, contextlib.nullcontext),
    "dispatch mode around the call": (_Sines, contextlib.nullcontext),
    "flushing of denormals around the call": (_flushing, contextlib.nullcontext),
    "oneDNN off around the call": (_without_onednn, contextlib.nullcontext),
    "dispatch mode around backward": (contextlib.nullcontext, _Sines),
    "default dtype around backward": (contextlib.nullcontext, _double),
    "hooks on saved tensors around backward": (contextlib.nullcontext, _scaled),
    "inference mode around backward": (contextlib.nullcontext, torch.inference_mode),
    "autocast around backward": (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)),
}  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", AROUND)
def test_what_surrounded_the_call_surrounds_its_recomputes(front: str, name: str) -> None:
    around, back = AROUND[name]
    _assert_same(_least(front, around, _nothing, back), _step(front, _plain, around, _nothing, back))


@pytest.mark.parametrize("front", FRONTS)
def test_hooks_on_saved_tensors_around_the_call_are_refused_by_name(front: str) -> None:
    with pytest.raises(InputError, match="saved_tensors_hooks"):
        _least(front, _scaled, _nothing, contextlib.nullcontext)
    disabled = functools.partial(torch.autograd.graph.disable_saved_tensors_hooks, "not here")
    with pytest.raises(InputError, match="not here"):
        _least(front, disabled, _nothing, contextlib.nullcontext)


@pytest.mark.parametrize("front", FRONTS)
def test_a_hook_on_all_modules_that_has_gone_is_refused_by_name(front: str) -> None:
    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        handle = register_module_forward_hook(lambda module, given, out: out * 1.1)
        try:
            yield
        finally:
            handle.remove()

    with pytest.raises(GradientError, match="hook on all modules"):
        _least(front, hooked, _nothing, contextlib.nullcontext)


@pytest.mark.parametrize("front", FRONTS)
def test_backward_inside_a_stage_is_refused_and_leaves_gradients_alone(front: str) -> None:
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.linear(x.detach()).sum().backward()
            return super().forward(x)

    blocks: list[nn.Module] = [Inside() for _ in range(1 if front == "loop" else 6)]
    before = torch.ones(WIDTH, WIDTH)
    blocks[0].linear.weight.grad = before.clone()  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"calls backward\(\)"):
        _ours(front, blocks, 2**20)(torch.randn(16, WIDTH, requires_grad=True))
    assert torch.equal(blocks[0].linear.weight.grad, before)  # type: ignore[arg-type, union-attr]


def test_a_step_may_not_write_into_its_input_row() -> None:
    weight, rows = nn.Parameter(torch.eye(WIDTH) / 2), torch.ones(8, WIDTH)
    before = copy.deepcopy(rows)
    run = ts.Loop(lambda h, row: torch.tanh(h @ weight) + row.mul_(2), budget=2**20)
    with pytest.raises(InputError, match="writes into its input"):
        run(torch.zeros(WIDTH), inputs=rows)
    assert torch.equal(rows, before)


def test_a_condition_that_counts_is_asked_once_a_step() -> None:
    asked: list[float] = []

    def until(h: Tensor) -> bool:
        asked.append(float(h.sum()))
        return len(asked) > 9

    weight = nn.Parameter(torch.eye(WIDTH) / 2)
    ts.Loop(lambda h: torch.tanh(h @ weight) + 1, budget=2**20)(torch.zeros(WIDTH), until=until)
    assert len(asked) == 10


def _assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


COUNT, COUNTS = 0, {"n": 0}


class _Counts(Block):
    """Its output depends on how often it was called, which a class, a closure or the module of the class keeps."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * type(self).calls


class _CountsInDict(Block):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS["n"] += 1
        return super().forward(x) * COUNTS["n"]


class _CountsInGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(x) * COUNT


def _counting_in_closure() -> type[Block]:
    n = 0

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal n
            n += 1
            return super().forward(x) * n

    return Counts


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", [_Counts, _CountsInDict, _CountsInGlobal, _counting_in_closure()])
def test_what_a_forward_counts_outside_its_module_is_refused_and_put_back(front: str, kind: type[Block]) -> None:
    blocks: list[nn.Module] = [kind() for _ in range(1 if front == "loop" else 6)]
    before = COUNT, COUNTS["n"], _Counts.calls
    with pytest.raises(InputError, match="goes further with each run"):
        _ours(front, blocks, 2**20)(torch.randn(16, WIDTH, requires_grad=True))
    assert before == (COUNT, COUNTS["n"], _Counts.calls)


def test_what_a_forward_adds_to_its_class_goes_with_the_profile() -> None:
    class Adds(Block):
        def forward(self, x: Tensor) -> Tensor:
            type(self).seen = getattr(type(self), "seen", 0) + 1  # type: ignore[attr-defined]
            return super().forward(x) * type(self).seen  # type: ignore[attr-defined]

    with pytest.raises(InputError, match="goes further with each run"):
        ts.Chain([Adds() for _ in range(3)], budget=2**20)(torch.randn(16, WIDTH, requires_grad=True))
    assert not hasattr(Adds, "seen")


def test_the_precision_of_convolutions_is_that_of_the_call() -> None:
    ask, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    put("mkldnn", "conv", "bf16")
    try:
        surroundings = Surroundings(on_cpu=True)
        assert surroundings.hold()
    finally:
        put("mkldnn", "conv", "none")
    assert not surroundings.hold()
    with surroundings.again():
        assert ask("mkldnn", "conv") == "bf16"
    assert ask("mkldnn", "conv") == "none"
