"""What a model does between its blocks is recomputed with them: bits, budgets, and what is left as it is."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from place import DEVICE
from streamable import WIDTH, Chained, Model, dense, numbers
from streaming import ENGINES, LEVELS, assert_exact, budget_at, loss_at, streamed
from streaming import options_of as usual_options
from torch import Tensor, nn

import tapestream as ts

DEEP = 6


def options_of(*given: Any) -> dict[str, Any]:
    """Arguments of `stream`."""
    return usual_options(*given) | {"between": "recompute"}


class Working(Chained):
    """A drawn kind of work between blocks, with parameters of the model's own."""

    def __init__(self, work: Callable[["Working", Tensor, int, list[Tensor]], Tensor]) -> None:
        super().__init__(dense(DEEP), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.work = work
        self.norm = nn.LayerNorm(WIDTH)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(WIDTH) / 4)
        self.register_buffer("mask", torch.rand(WIDTH).round())

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.before(x), list[Tensor]()
        for k in range(DEEP):
            x = self.work(self, x, k, seen)
        return self.after(x)


def residual(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    return x + model.blocks[k](x)


def residual_first(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """All that is used again is used within the chain."""
    return x.cos() + x * model.blocks[k](x) if k == 0 else model.blocks[k](x)


def scaled_residual(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """The scale saves what the block has made."""
    return x + model.scale * model.blocks[k](x) + model.shift


def norm_before(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """What the work begins with is used behind the block, too."""
    return x + F.dropout(model.blocks[k](model.norm(x)), 0.3, training=model.training)


def norm_behind(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    return model.norm(x + model.blocks[k](x))


def gate(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    h = model.blocks[k](x)
    return (x * torch.sigmoid(h) + h * model.mask).clamp(-3, 3)


def skips(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    if k < DEEP // 2:
        x = F.gelu(model.blocks[k](x))
        seen.append(x)
        return x
    return model.blocks[k](torch.cat([x, seen.pop()], -1).unflatten(-1, (2, WIDTH)).mean(-2))


def two_forms(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """Sums of the block's input and of the model's, and what is used several times."""
    seen.append(x)
    y = model.blocks[k](x + seen[0]) if k % 2 else model.blocks[k](x)
    return x + y * y + seen[max(0, k - 2)] * model.scale.exp()


def numbers_asked(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """Python decides by numbers, and noise is drawn like a tensor of the chain."""
    y = model.blocks[k](x)
    y = y * (1 + float(y.detach().mean())) if float(y.detach().sum()) > 0 else y - torch.rand_like(y) / 8
    with torch.no_grad():
        kept = y.abs() < 2
    return x + torch.where(kept, y, torch.zeros_like(y))


def twice(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    x = x + model.blocks[k](x)
    return torch.tanh(x) + model.blocks[0](x)


def in_halves(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """Views, and functions of several results."""
    one, other = model.blocks[k](x).chunk(2, -1)
    top, _ = torch.cat([other, one * 2], -1).sort(-1)
    return x + top.flip(-1)


def writes_behind(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    """Into what a chain's state would be."""
    x = x + 1
    return x.add_(model.blocks[k](model.norm(x * 2))) if k % 2 else x + model.blocks[k](x)


def draws_apart(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    own = torch.Generator(x.device).manual_seed(k)
    return x + torch.bernoulli(torch.sigmoid(model.blocks[k](x)), generator=own) * x + model.blocks[k](x)


KINDS: dict[str, Callable[..., Tensor]] = {
    one.__name__: one
    for one in (
        residual, scaled_residual, norm_before, norm_behind, gate, skips, two_forms, numbers_asked, twice, in_halves,
    )
}  # fmt: skip


def case_of(kind: str, *, autocast: bool = False) -> Model:
    return Model(lambda: Working(KINDS[kind]), numbers(3, WIDTH), autocast=autocast)


def sgd(model: nn.Module) -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)


def chains_of(model: nn.Module) -> list[int]:
    """Blocks per chain of the last call."""
    return [len(one.positions) for one in ts.frontends.module.stream.handle_of(model).last.segments]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_bit_exact(kind: str, level: str, engine: str, tmp_path: Path) -> None:
    case, options = case_of(kind), options_of(engine, tmp_path)
    assert_exact(case, budget_at(level, case, sgd, **options), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_device_within_the_least_budget(kind: str, tmp_path: Path) -> None:
    case, options = case_of(kind), options_of("auto", tmp_path, "device")
    assert_exact(case, budget_at("least", case, sgd, **options), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_are_one_chain(kind: str, tmp_path: Path) -> None:
    case = case_of(kind)
    with streamed(case, "1 MiB", **options_of("auto", tmp_path)) as model:
        loss_at(model, case)
        assert max(chains_of(model)) == DEEP * (1 + (kind == "twice"))


@pytest.mark.parametrize("kind", ["residual", "norm_before", "gate", "skips"])
def test_under_autocast(kind: str, tmp_path: Path) -> None:
    case, options = case_of(kind, autocast=True), options_of("auto", tmp_path)
    assert_exact(case, budget_at("least", case, sgd, **options), **options)


def in_place(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    return (model.blocks[k](x) * 2).add_(x)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * 2


def function(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    return x + _Double.apply(model.blocks[k](x))


class _Moded(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.sin.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


def moded(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    y = model.blocks[k](x)
    with _Moded():
        return x + torch.tanh(y)


def saving(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    y = model.blocks[k](x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.5, lambda t: t):
        return x + y * y


def writes_buffers(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
    y = model.blocks[k](x)
    return x + F.batch_norm(y, model.mask, model.mask.abs() + 1, training=False) + _counted(model, y)


def _counted(model: Any, y: Tensor) -> Tensor:
    running, spread = model.mask, torch.ones(WIDTH, device=y.device)
    return F.batch_norm(y, running, spread, training=True)


@pytest.mark.parametrize("work", [in_place, function, moded, saving, writes_buffers])
@pytest.mark.parametrize("level", ["full", "least"])
def test_what_cannot_run_again_parts_chains_and_is_exact(work: Any, level: str, tmp_path: Path) -> None:
    case = Model(lambda: Working(work), numbers(3, WIDTH))
    options = options_of("adversarial", tmp_path)
    assert_exact(case, budget_at(level, case, sgd, **options), **options)
    with streamed(case, "1 MiB", **options) as model:
        loss_at(model, case)
        assert max(chains_of(model)) == 1
        assert len(ts.report(model).parted) == DEEP - 1
        assert "chain 2 begins before block 1: " in str(ts.report(model))


@pytest.mark.parametrize("work", [writes_behind, draws_apart])
def test_writes_into_a_state_and_generators_of_its_own_are_exact(work: Any, tmp_path: Path) -> None:
    case, options = Model(lambda: Working(work), numbers(3, WIDTH)), options_of("auto", tmp_path, "device")
    assert_exact(case, budget_at("least", case, sgd, **options), **options)


@contextlib.contextmanager
def _least(case: Model, **options: Any) -> Iterator[nn.Module]:
    budget = budget_at("least", case, sgd, **options)
    with streamed(case, budget, **options) as model:
        sgd(model)
        yield model


@pytest.mark.parametrize("kind", ["norm_before", "scaled_residual"])
def test_hooks_and_retained_gradients_between_blocks_see_what_they_do(kind: str, tmp_path: Path) -> None:
    kept = list[Any]()

    def work(model: Any, x: Tensor, k: int, seen: list[Tensor]) -> Tensor:
        y = KINDS[kind](model, x, k, seen)
        y.retain_grad()
        y.register_hook(lambda g: kept.append(g.clone()))
        kept.append(y)
        return y

    case, found = Model(lambda: Working(work), numbers(3, WIDTH)), list[list[Tensor]]()

    def run(model: nn.Module) -> None:
        kept.clear()
        torch.manual_seed(3)
        loss_at(model, case).backward()
        gradients = [one.grad if one.grad is not None else one for one in kept]
        found.append(
            [*(one.clone() for one in gradients), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )

    run(case.model().to(DEVICE))
    with _least(case, **options_of("auto", tmp_path, "device")) as model:
        run(model)
        assert max(chains_of(model)) == DEEP
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


class UsesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.layer_norm(x, (WIDTH,)))) + 0.3 * x * x.sin()


def test_sums_keep_their_order_where_all_that_is_used_again_is_used_within_a_chain(tmp_path: Path) -> None:
    def made() -> nn.Module:
        model = Working(residual_first)
        model.blocks = nn.ModuleList(UsesTwice() for _ in range(DEEP))
        return model

    case = Model(made, numbers(64, WIDTH))
    plain = case.model().to(DEVICE)
    loss_at(plain, case).backward()
    with _least(case, **options_of("auto", tmp_path, "device")) as model:
        loss_at(model, case).backward()
        assert max(chains_of(model)) == DEEP
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert [name for name, gradient in wanted.items() if not torch.equal(gradient, found[name])] == []


@pytest.mark.parametrize("what", ["scale", "mask"])
def test_what_work_reads_may_not_change_before_backward(what: str, tmp_path: Path) -> None:
    case = case_of({"scale": "scaled_residual", "mask": "gate"}[what])
    with _least(case, **options_of("auto", tmp_path, "device")) as model:
        loss = loss_at(model, case)
        with torch.no_grad():
            getattr(model, what).mul_(1.5)
        with pytest.raises((ts.GradientError, RuntimeError), match=r"modified by an in-?place operation"):
            loss.backward()


def test_a_gradient_of_work_alone(tmp_path: Path) -> None:
    """Backward comes between two blocks, and to none of those behind."""
    case = case_of("two_forms")

    def found(model: Any) -> list[Tensor]:
        torch.manual_seed(3)
        seen, x = list[Tensor](), torch.randn(3, WIDTH, device=DEVICE)
        model.work = lambda own, given, k, _: KINDS["two_forms"](own, given, k, seen)
        model(x)
        seen[3].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = found(case.model().to(DEVICE))
    with _least(case, **options_of("auto", tmp_path, "device")) as model:
        mine = found(model)
    assert len(plain) == len(mine)
    assert all(map(torch.equal, plain, mine))


def test_other_work_from_call_to_call_is_exact_or_refused(tmp_path: Path) -> None:
    case, plainly = case_of("residual"), case_of("residual").model().to(DEVICE)
    with _least(case, **options_of("auto", tmp_path, "device")) as model:
        for name in ("residual", "gate", "norm_before", "residual"):
            gradients = []
            for one in (plainly, model):
                one.work = KINDS[name]
                torch.manual_seed(3)
                one.zero_grad()
                try:
                    loss_at(one, case).backward()
                except (ts.InputError, ts.BudgetError):
                    assert one is model
                    return
                gradients.append([p.grad for p in one.parameters()])
            assert all(
                (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*gradients, strict=True)
            )


def test_the_least_budget_is_that_of_work_inside_of_the_blocks(tmp_path: Path) -> None:
    class Wide(nn.Sequential):
        def __init__(self, inside: bool) -> None:
            super().__init__(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x) if self.inside else super().forward(x)

    class Around(Chained):
        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            for block in self.blocks:
                x = block(x) if block.inside else x + block(x)
            return self.after(x)

    def least(inside: bool) -> int:
        made = lambda: Around([Wide(inside) for _ in range(8)], nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
        return budget_at("least", Model(made, numbers(1024, WIDTH)), sgd, **options_of("auto", tmp_path, "device"))

    assert least(inside=False) <= 1.1 * least(inside=True)
