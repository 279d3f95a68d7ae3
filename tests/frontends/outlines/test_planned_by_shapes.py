"""`ts.plan` by shapes alone has the numbers of the command, to the last digit."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.costs.machine import usual_links
from tapestream.models import GPT, GPTConfig

RAM, DISK, FLOPS = 64 << 30, 1 << 40, 50e12
MACHINE = ts.Machine(usual_links("cuda", link=12e9, read=2e9, write=1e9), FLOPS, memory_bytes_per_second=5e11)
GIVEN = [
    "--ram", "64GiB", "--disk", "1TiB", "--flops", "50e12", "--memory-rate", "500GB/s", "--link", "12GB/s",
    "--disk-read", "2GB/s", "--disk-write", "1GB/s",
]  # fmt: skip
SIZES = ["--layers", "6", "--width", "256", "--seq", "128", "--vocabulary", "512", "--batch", "2"]


class Deep(nn.Module):
    """Blocks, and a head of some other class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(5))
        self.head = nn.Conv1d(96, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.unsqueeze(2)).square().mean()


class TwoChains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.first, self.second, strict=True):
            x, y = one(x).tanh(), other(y).tanh()
        return (x + y).sum()


def gpt() -> tuple[nn.Module, Any]:
    config = GPTConfig(layers=6, width=256, heads=4, vocabulary=512, context=128)
    ids = torch.zeros(2, 128, dtype=torch.int64)
    return GPT(config), (ids, ids.clone())


def deep() -> tuple[nn.Module, Any]:
    return Deep(), torch.zeros(512, 96)


def two() -> tuple[nn.Module, Any]:
    return TwoChains(), (torch.zeros(256, 64), torch.zeros(256, 64))


MODELS = {"gpt": gpt, "deep": deep, "two": two}


def on_meta(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return make()


@pytest.fixture(autouse=True)
def _factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factories by the name of a module, as the command takes them."""
    module = ModuleType("shapes_alone")
    vars(module).update(MODELS)
    monkeypatch.setitem(__import__("sys").modules, "shapes_alone", module)


def command(name: str, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(make_app(), ["plan", f"shapes_alone:{name}", *options, "--json"])
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def assert_same_numbers(plan: ts.Plan, answer: dict[str, Any]) -> None:
    step = plan.step
    assert step is not None
    assert step.seconds == answer["seconds_per_step"]
    assert step.waiting_seconds == answer["waiting_seconds"]
    assert step.overhead == answer["overhead"]
    assert step.forwards == answer["forwards"]
    assert step.moved_nbytes == answer["moved_nbytes"]
    for tier, nbytes in step.peak_nbytes.items():
        assert nbytes == answer["tiers"][tier.name.lower()]["peak_nbytes"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("room", [1.1, 2, 100])
def test_the_numbers_are_those_of_the_command(name: str, device: str, room: float) -> None:
    machine = MACHINE if device == "cuda" else ts.Machine(usual_links("cpu", read=2e9, write=1e9), FLOPS)
    given = GIVEN if device == "cuda" else ["--disk", "1TiB", "--flops", "50e12", "--disk-read", "2GB/s",
                                            "--disk-write", "1GB/s"]  # fmt: skip
    model, batch = on_meta(MODELS[name])
    asked = {"device": device, "machine": machine}

    def within(nbytes: int) -> ts.Budget:
        return ts.Budget(device=nbytes, host=RAM if device == "cuda" else None, disk=DISK)

    with pytest.raises(ts.BudgetError) as refused:
        ts.plan(model, batch, budget=within(1000), **asked)
    assert refused.value.least_nbytes is not None
    budget = int(room * refused.value.least_nbytes)
    document = command(name, "--device", device, "--budget", str(budget), *given)
    if not document["fits"]:
        with pytest.raises(ts.BudgetError) as refused:
            ts.plan(model, batch, budget=within(budget), **asked)
        assert document["least_nbytes"] == refused.value.least_nbytes
        return
    plan = ts.plan(model, batch, budget=within(budget), **asked)
    assert_same_numbers(plan, document["answer"])
    assert plan.peak_nbytes <= budget
    assert "whole step" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"optimizer": "sgd", "update": "backward"}, ["--optimizer", "sgd", "--update", "backward"]),
        ({"where": "host"}, ["--where", "host"]),
        ({"home": "host"}, ["--home", "host"]),
        ({"home": "disk"}, ["--home", "disk"]),
        ({"home": "device"}, ["--home", "device"]),
    ],
)
def test_arguments_are_the_options_of_the_command(arguments: dict[str, Any], options: list[str]) -> None:
    given = [one for one in GIVEN if one not in ("--disk", "1TiB")] if "host" in arguments.values() else GIVEN
    given = [*GIVEN[:2], *GIVEN[4:10]] if options == ["--home", "host"] else given
    model, batch = on_meta(gpt)
    budget = ts.Budget(device="96MiB", host=RAM, disk=DISK)
    plan = ts.plan(model, batch, budget=budget, device="cuda", machine=MACHINE, **arguments)
    assert_same_numbers(plan, command("gpt", "--budget", "96MiB", *given, *options)["answer"])


def test_weights_here_and_a_gpu_elsewhere_are_planned_as_on_meta() -> None:
    asked: dict[str, Any] = {"budget": ts.Budget("24MiB", host=RAM, disk=DISK), "device": "cuda", "machine": MACHINE}
    if torch.cuda.is_available():
        pytest.skip("the GPU is here")
    model, batch = gpt()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = ts.plan(model, batch, **asked)
    assert found.step == ts.plan(*on_meta(gpt), **asked).step
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    with pytest.raises(ts.InputError, match=r"machine=ts\.Machine"):
        ts.plan(model, batch, budget="24MiB", device="cuda")


def test_a_batch_on_meta_is_enough() -> None:
    model, _ = gpt()
    _, batch = on_meta(gpt)
    plan = ts.plan(model, batch, budget="24MiB", device="cpu")
    assert plan.step == ts.plan(*on_meta(gpt), budget="24MiB", device="cpu").step
    assert type(model) is GPT
    assert all(not p.is_meta for p in model.parameters())


def test_a_published_size_that_the_command_outlines_by_fewer_blocks_has_the_same_numbers() -> None:
    options = ["gpt", "--layers", "6", "--width", "256", "--heads", "4", *SIZES[4:], "--budget", "24MiB", *GIVEN]
    document = json.loads(CliRunner().invoke(make_app(), ["plan", *options, "--json"]).stdout)
    budget = ts.Budget("24MiB", host=RAM, disk=DISK)
    assert_same_numbers(ts.plan(*on_meta(gpt), budget=budget, device="cuda", machine=MACHINE), document["answer"])


def test_the_longest_call_is_planned_first_and_may_be_a_shape() -> None:
    model, batch = on_meta(gpt)
    short = tuple(t[:, :32] for t in batch)
    asked: dict[str, Any] = {"device": "cuda", "machine": MACHINE}
    by_shape = ts.plan(model, short, longest=(2, 128), budget="1GiB", **asked)
    assert by_shape.paces == ts.plan(model, short, longest=batch, budget="1GiB", **asked).paces
    assert [pace.size for pace in by_shape.paces] == [(2, 32), (2, 128)]
    needs = []
    for call in (short, batch):
        with pytest.raises(ts.BudgetError) as refused:
            ts.plan(model, call, budget=1000, **asked)
        needs.append(refused.value.least_nbytes)
    assert needs[0] is not None
    assert needs[0] < needs[1]
    ts.plan(model, short, budget=needs[1] - 1, **asked)
    with pytest.raises(ts.BudgetError, match=r"^the longest call \(longest=\)") as refused:
        ts.plan(model, short, longest=torch.Size((2, 128)), budget=needs[1] - 1, **asked)
    assert refused.value.least_nbytes == needs[1]


def test_more_budget_is_never_slower() -> None:
    """One outline serves all budgets; of blocks that move, a plan may be 3% slower than the fastest, which is not."""
    for name, make in MODELS.items():
        model, batch = on_meta(make)
        asked: dict[str, Any] = {"device": "cuda", "machine": MACHINE}
        with pytest.raises(ts.BudgetError) as refused:
            ts.plan(model, batch, budget=1000, **asked)
        least = refused.value.least_nbytes
        assert least is not None
        before = float("inf")
        for k in range(12):
            try:
                plan = ts.plan(model, batch, budget=int(least * 1.25**k), **asked)
            except ts.BudgetError:
                assert k == 0  # planners round
                continue
            assert plan.step is not None
            assert plan.step.seconds <= before * 1.03, (name, k)
            before = min(before, plan.step.seconds)


def test_what_has_no_effect_is_refused_by_name(tmp_path: Path) -> None:
    model, batch = on_meta(gpt)
    asked: dict[str, Any] = {"device": "cuda", "machine": MACHINE}
    for wrong, told in (
        ({"verify": True}, "verify= has no effect"),
        ({"home": "attic"}, "home='attic'"),
        ({"device": "xpu"}, "'cpu' or 'cuda'"),
        ({"optimizer": "lion"}, "optimizer 'lion'"),
        ({"longest": (3, 4, 5)}, r"first tensor has the shape \(2, 128\)"),
    ):
        with pytest.raises(ts.InputError, match=told):
            ts.plan(model, batch, **{"budget": "1GiB", **asked, **wrong})
    if not torch.cuda.is_available():
        with pytest.raises(ts.InputError, match="say how much"):
            ts.plan(model, batch, **asked)
    with pytest.raises(ts.InputError, match="optimizer= counts where shapes alone"):
        ts.plan(*deep(), budget="1GiB", device="cpu", optimizer="sgd")
    streamed = ts.stream(deep()[0], device="cpu", budget="1GiB")
    with pytest.raises(ts.InputError, match="streamed already"):
        ts.plan(streamed, torch.zeros(4, 96, device="meta"))
    ts.unstream(streamed)


def test_what_would_help_is_tried_by_shapes_too() -> None:
    model, batch = on_meta(gpt)
    asked: dict[str, Any] = {"device": "cuda", "machine": MACHINE, "suggest": True}
    plan = ts.plan(model, batch, budget="20MiB", **asked)
    assert plan.step is not None
    assert plan.remedies
    assert all(one.before_seconds == plan.step.seconds for one in plan.remedies)
    with pytest.raises(ts.BudgetError, match="It fits with"):
        ts.plan(model, tuple(t.repeat(4, 1) for t in batch), budget="14MiB", **asked)
