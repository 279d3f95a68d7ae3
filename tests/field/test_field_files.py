"""Plan files and manifests of saves that something has changed: refused by name, or what is read can be used."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.costs import BlockCost, Carried, Link, Machine, Profile, StageCost
from tapestream.errors import InputError, StorageError, TapestreamError
from tapestream.ir import Tier
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan

DISK, DEVICE = Tier.DISK, Tier.DEVICE
VALUES = (
    None, True, -1, 0, 1, 2**63, 10**30, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "0", "\0", [],
    [[]], {}, [1, 2, 3], {"x": 1}, "../x",
)  # fmt: skip


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)]


def documents() -> list[Any]:
    """Plans of a chain that stores, of one that recomputes, and of blocks that move."""
    found, x = [], torch.ones(4, 8)
    for planner in ("store_all", "revolve", "rotor"):
        net = ts.Chain(stages(), planner=planner)
        net(x)
        assert net.plan is not None
        found.append(net.plan)
    machine = Machine({(DISK, DEVICE): Link(20.0, 0.01, 8.0), (DEVICE, DISK): Link(15.0, 0.01)}, 1e9, "a machine")
    costs = tuple(StageCost(1.0, 2.0, 4, 6, block=k) for k in range(6))
    profile = Profile(costs, 4, (BlockCost(10, 10, 20, 1, 0.1),) * 6, (Carried(1, 3, 2),), 3, 4, 0.5)
    return [*found, make_plan(profile, 120, machine, update="step")]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values lie in a document of JSON."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(document: Any, random: Random) -> str:
    """Text of it, in which one to three things are otherwise."""
    found = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        *way, last = random.choice(list(places(found)))
        holder = found
        for key in way:
            holder = holder[key]
        match random.randrange(8):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case 2 if isinstance(holder[last], (int, float)):
                holder[last] = holder[last] * random.choice((-1, 2, 1000)) + random.choice((-1, 0, 1))
            case 3 | 4 if isinstance(holder[last], str) and len(holder[last]) > 1:
                holder[last] = _other_text(holder[last], random)
            case _:
                holder[last] = random.choice(VALUES)
    text = json.dumps(found)
    if random.random() < 0.1:
        text = _other_text(text, random)
    return text


def _other_text(text: str, random: Random) -> str:
    at = random.randrange(len(text))
    lines = text.splitlines()
    match random.randrange(4):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            return text[:at] + random.choice('0919-. []{}"xR\n') + text[at:]
        case 2:
            return text[:at]
        case _:
            random.shuffle(lines)
            return "\n".join(lines)


def used(plan: Plan, x: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """Shown, written, and given to a chain: plain PyTorch's gradients, or a refusal by name."""
    str(plan), repr(plan)
    try:
        net = ts.Chain(stages(), plan=plan)
        net(x).sum().backward()
    except TapestreamError:
        return
    assert all(map(torch.equal, [p.grad for p in net.parameters() if p.grad is not None], expected))


@pytest.mark.parametrize("numbers", [range(80), pytest.param(range(80, 1000), marks=pytest.mark.full)], ids=str)
def test_mutated_plans(numbers: range, tmp_path: Path) -> None:
    path, x, plain = tmp_path / "plan.json", torch.ones(4, 8), nn.Sequential(*stages())
    plain(x).sum().backward()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    texts = []
    for plan in documents():
        plan.save(path)
        texts.append(json.loads(path.read_text()))
    taken = 0
    for number in numbers:
        random = Random(number)
        path.write_text(mutated(random.choice(texts), random), encoding="utf-8")
        try:
            plan = Plan.load(path)
        except InputError as error:
            assert "plan.json" in str(error)  # noqa: PT017
            continue
        taken += 1
        used(plan, x, expected)
    assert taken < len(numbers) / 2


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def state_of(parts: dict[str, Any]) -> list[Any]:
    """All that a load may change."""
    state = [*parts["model"].parameters(), torch.get_rng_state()]
    inner = [dict(one.items()) for one in parts["optimizer"].state.values()]
    return [[t.clone() for t in state], copy.deepcopy(inner), copy.deepcopy(parts["schedule"].state_dict())]


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.full)], ids=str)
def test_mutated_manifests(numbers: range, tmp_path: Path) -> None:
    """With a checksum that is right: what is refused has changed nothing."""
    parts = training()
    parts["model"](torch.randn(2, 4)).sum().backward()
    parts["optimizer"].step()
    path = ts.save(tmp_path, **parts, tag=("a", 1.5, {"b": [2]})) / "manifest.json"
    saved = json.loads(path.read_text())["save"]
    for number in numbers:
        text = mutated(saved, Random(number))
        try:
            crc = crc32(json.dumps(json.loads(text)).encode())
        except ValueError:  # no JSON any more
            crc = 0
        path.write_text(f'{{"crc32": {crc}, "save": {text}}}')
        fresh = training()
        before = state_of(fresh)
        try:
            ts.load(tmp_path, **fresh)
        except (StorageError, InputError):
            assert repr(state_of(fresh)) == repr(before), number
