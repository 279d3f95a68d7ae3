"""Every update is that of the same torch optimizer on the plain model, bit for bit."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from streamable import MODELS, WIDTH, Chained, Model, dense, gpt, numbers, tokens
from streaming import assert_exact, budget_at, everything, gradients_of, loss_at, options_of, state_of, streamed, train
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError


class Anchored(torch.optim.Optimizer):
    """Makes its state when it is made, as Adagrad does in older PyTorch; each step pulls towards the start, too."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"count": torch.tensor(0.0), "start": p.detach().clone()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] += 1
                    pull = (p - self.state[p]["start"]).div_(self.state[p]["count"])
                    p.sub_(p.grad.add(pull), alpha=group["lr"])


CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
    "state made at once": (Anchored, {"lr": 0.05}),
}


def adamw(model: nn.Module, update: str = "step", **options: Any) -> Any:
    return ts.optimizer(model, torch.optim.AdamW, lr=0.01, update=update, **{"master": None, **options})


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    found = options_of("adversarial", tmp_path)
    return found | {"budget": budget_at("least", CASE, adamw, **found)}


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[tuple[nn.Module, Any]]:
    found = options_of("adversarial", tmp_path)
    with streamed(CASE, budget_at("least", CASE, lambda m: adamw(m, "backward"), **found), **found) as model:
        yield model, adamw(model, "backward")


@pytest.mark.thinned(6)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, update: str, tmp_path: Path) -> None:
    make, knobs = OPTIMIZERS[name]
    found = options_of("adversarial", tmp_path)
    budget = budget_at("least", CASE, lambda m: ts.optimizer(m, make, update=update, master=None, **knobs), **found)
    assert_exact(CASE, budget, make=make, knobs=knobs, update=update, **found)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of which the second leaves some parameters out."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if n.endswith("bias") and "blocks.2" not in n]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_groups_and_schedulers(update: str, tmp_path: Path) -> None:
    found = options_of("adversarial", tmp_path)
    make = lambda m: ts.optimizer(m, torch.optim.AdamW, lr=0.01, update=update, groups=groups_of(m))  # noqa: E731
    budget = budget_at("least", CASE, make, **found)
    theirs, traces = CASE.model(), []
    with streamed(CASE, budget, **found) as ours:
        for model, optimizer in ((theirs, torch.optim.AdamW(groups_of(theirs), lr=0.01)), (ours, make(ours))):
            schedulers = [
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.5),
            ]
            trace: dict[str, Any] = {}
            for step in range(4):
                seed(step)
                loss_at(model, CASE).backward()
                optimizer.step()
                optimizer.zero_grad()
                for scheduler in schedulers:
                    scheduler.step()
                trace |= everything(model, f"{step} ")
            traces.append(trace | state_of(optimizer) | {"lr": torch.tensor(schedulers[0].get_last_lr())})
    assert_same(*traces)


def test_clipping_by_global_norm(options: dict[str, Any]) -> None:
    theirs, traces = CASE.model(), []
    with streamed(CASE, **options) as ours:
        for model, optimizer in ((theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01)), (ours, adamw(ours))):
            trace: dict[str, Any] = {}
            for step in range(3):
                for micro in range(2):
                    seed(10 * step + micro)
                    loss_at(model, CASE).backward()
                trace[f"{step} norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                trace |= {f"{step} gradient {n}": g for n, g in gradients_of(model).items()}
                optimizer.step()
                optimizer.zero_grad()
            traces.append(trace | everything(model))
    assert_same(*traces)


@pytest.mark.on_cpu("a GPU needs ts.GradScaler")
def test_a_gradient_scaler(options: dict[str, Any]) -> None:
    theirs, traces = CASE.model(), []
    with streamed(CASE, **options) as ours:
        for model, optimizer in ((theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01)), (ours, adamw(ours))):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for step in range(3):
                seed(step)
                scaler.scale(loss_at(model, CASE)).backward()
                if step == 1:
                    next(iter(model.blocks[2].parameters())).grad.fill_(float("inf"))  # this step must be left out
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            traces.append(everything(model) | state_of(optimizer))
    assert_same(*traces)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "master"), [("dense", None), ("gpt_bf16", "auto"), ("gpt_bf16", None)])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_saved_state_resumes_bit_for_bit(name: str, master: str | None, update: str, tmp_path: Path) -> None:
    case = CASE if name == "dense" else MODELS[name]
    found = options_of("adversarial", tmp_path)
    make = lambda m: adamw(m, update, master=master)  # noqa: E731
    budget = budget_at("least", case, make, **found)

    def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            seed(step)
            loss_at(model, case).backward()
            optimizer.step()
            optimizer.zero_grad()

    with streamed(case, budget, **found) as model:
        optimizer = make(model)
        steps(model, optimizer, 0, 2)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        steps(model, optimizer, 2, 4)
        expected = everything(model) | state_of(optimizer)
    with streamed(case, budget, **found) as model:
        optimizer = make(model)
        steps(model, optimizer, 7, 8)  # something else before
        file.seek(0)
        saved = torch.load(file)
        before = copy.deepcopy(saved)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        steps(model, optimizer, 2, 4)
        assert_same(expected, everything(model) | state_of(optimizer))
        for number, entries in before["optimizer"]["state"].items():  # what was loaded is not written to
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["optimizer"]["state"][number][key]))


@pytest.mark.parametrize("make", [torch.optim.AdamW, Anchored])
def test_a_plain_optimizers_state_can_be_loaded(make: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    theirs = CASE.model()
    plain = make(theirs.parameters(), lr=0.01)
    train(theirs, plain, CASE)
    with streamed(CASE, **options) as ours:
        optimizer = ts.optimizer(ours, make, lr=0.01, master=None)
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        assert_same(state_of(plain), state_of(optimizer))
        assert_same(train(theirs, plain, CASE), train(ours, optimizer, CASE))


def test_fp32_masters_of_bf16_parameters(tmp_path: Path) -> None:
    """Against the loop that one writes by hand."""
    case = Model(lambda: gpt(dtype=torch.bfloat16), tokens)
    found = options_of("adversarial", tmp_path)
    for update in ("step", "backward"):
        make = lambda m, update=update: adamw(m, update, master="auto")  # noqa: E731
        budget = budget_at("least", case, make, **found)
        theirs = case.model()
        masters = [p.detach().float() for p in theirs.parameters()]
        plain = torch.optim.AdamW(masters, lr=0.01)
        with streamed(case, budget, **found) as ours:
            optimizer = make(ours)
            for step in range(4):
                seed(step)
                loss_at(theirs, case).backward()
                for p, master in zip(theirs.parameters(), masters, strict=True):
                    master.grad, p.grad = p.grad.float(), None
                plain.step()
                with torch.no_grad():
                    for p, master in zip(theirs.parameters(), masters, strict=True):
                        p.copy_(master)
                seed(step)
                loss_at(ours, case).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert_same(everything(theirs), everything(ours))


# ------------------------------------------------------------------------------------------------- update="backward"


def test_used_gradients_cannot_be_read(eager: tuple[nn.Module, Any]) -> None:
    model, optimizer = eager
    loss_at(model, CASE).backward()
    gradient = model.blocks[1].linear.weight.grad
    assert gradient is not None
    assert gradient.shape == (WIDTH, WIDTH)
    assert "gone" in repr(gradient)
    for read in (lambda: gradient + 1, lambda: gradient.norm(), lambda: gradient.clone(), lambda: gradient.tolist()):
        with pytest.raises(GradientError, match=r"update='backward'.*need update='step'"):
            read()
    with pytest.raises(GradientError, match="Clipping by global norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for to_none in (False, True):
        optimizer.zero_grad(set_to_none=to_none)
        model.zero_grad(set_to_none=to_none)
    assert all(p.grad is None for p in model.parameters())
    loss_at(model, CASE).backward()
    optimizer.step()
    for p in model.parameters():
        if type(p.grad) is torch.Tensor:  # of one outside the blocks
            p.grad = None
    loss_at(model, CASE).backward()  # what is left of the blocks' first is ignored


@pytest.mark.on_cpu("a GPU needs ts.GradScaler")
def test_a_gradient_scaler_is_refused(eager: tuple[nn.Module, Any]) -> None:
    model, optimizer = eager
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loss_at(model, CASE)).backward()
    with pytest.raises(GradientError, match="GradScaler"):
        scaler.step(optimizer)


def test_another_optimizer_takes_over(eager: tuple[nn.Module, Any]) -> None:
    model, _ = eager
    loss_at(model, CASE).backward()
    model.before.zero_grad()
    ts.frontends.module.stream.handle_of(model).budget = ts.Budget("1 MiB")
    optimizer = adamw(model)
    assert all(p.grad is None for block in model.blocks for p in block.parameters())
    before = everything(model)
    optimizer.step()
    assert_same(before, everything(model))  # nothing is left of what the first has used
    loss_at(model, CASE).backward()
    assert gradients_of(model)["blocks.0.linear.weight"] is not None
    optimizer.step()


def test_a_closure_and_a_name(options: dict[str, Any]) -> None:
    with streamed(CASE, **options) as model:
        optimizer = adamw(model)

        def closure() -> torch.Tensor:
            loss = loss_at(model, CASE)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        assert "AdamW" in repr(optimizer)
        assert "update='step'" in repr(optimizer)
