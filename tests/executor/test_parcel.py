"""States that travel to a slower tier and back: exact gradients, nothing left behind, under every engine."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tapestream.errors import GradientError
from tapestream.executor.engines import make_engine
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.travel.parcel import Parcels
from tapestream.ir import (
    MEMORIES,
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Value,
    Wait,
)
from tapestream.planning.profile import profile_stages
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage
from tapestream.runner.state import take_apart
from tapestream.simulate import simulate
from tapestream.storage import DiskFolder, Pool

CPU = torch.device("cpu")
STAGES = 4


class Half(nn.Module):
    """Hands on two views of one storage, and a third tensor that it leaves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        left, right, skip = state
        both = torch.tanh(self.linear(torch.cat((left, right.flip(-1)), -1)))
        return (both[:, :12] * 1.0, both.t()[12:].t(), skip)


def schedule_with_copies(tier: Tier) -> Schedule:
    """Every state is kept on the slower tier alone and comes back when its stage is recorded."""
    actions: list[Action] = [Phase(PhaseKind.FORWARD)]
    for k in range(STAGES - 1):
        value = Value(Kind.STATE, k)
        actions += [Keep(k), Offload(value, Tier.DEVICE, tier), Forward(k, k + 1)]
        actions += [Wait(value, tier), Free(value, Tier.DEVICE)]
    actions += [Record(STAGES - 1), Phase(PhaseKind.BACKWARD), Backward(STAGES - 1)]
    for k in reversed(range(STAGES - 1)):
        value = Value(Kind.STATE, k)
        actions += [Prefetch(value, tier, Tier.DEVICE), Wait(value, Tier.DEVICE), Free(value, tier), Restore(k)]
        actions += [Free(value, Tier.DEVICE), Record(k), Backward(k)]
    return Schedule.of(actions, STAGES)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(5, 12, generator=generator, requires_grad=True) for _ in range(3))


def differentiate(
    stages: list[nn.Module], engine_name: str, folder: Path, tier: Tier
) -> tuple[list[torch.Tensor | None], Pool]:
    state, _ = take_apart(inputs())
    profile, traits, _ = profile_stages([Stage(k, s) for k, s in enumerate(stages)], state, CPU)
    schedule = schedule_with_copies(tier)
    simulate(schedule, profile)
    with_stages = [Stage(k, s) for k, s in enumerate(stages)]
    pool = Pool(CPU, folder=DiskFolder(folder), limits={}, pin=False)
    engine = make_engine(engine_name, CPU)
    run = Interpreter(schedule, Runner(with_stages, traits, CPU), parcels=Parcels(pool, engine))
    run.begin(state)
    run.run_phase(PhaseKind.FORWARD)
    out = run.live
    assert out is not None
    run.cotangents[STAGES] = [torch.ones_like(t) for t in out.tensors]
    run.run_phase(PhaseKind.BACKWARD)
    engine.close()
    return [*run.cotangents[0], *(run.sums[id(p)][1] for s in stages for p in s.parameters())], pool


@pytest.mark.parametrize(
    ("engine", "tier"),
    [("threads", Tier.DISK), ("threads", Tier.HOST), ("adversarial", Tier.DISK), ("fake_streams", Tier.HOST)],
)
def test_gradients_through_travelling_states_are_exact(engine: str, tier: Tier, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [Half() for _ in range(STAGES)]
    leaves = inputs()
    state = leaves
    for stage in stages:
        state = stage(state)
    parameters = [p for s in stages for p in s.parameters()]
    expected = torch.autograd.grad([t.sum() for t in state], [*leaves, *parameters])

    found, pool = differentiate(stages, engine, tmp_path, tier)

    for mine, plain in zip(found, expected, strict=True):
        assert mine is not None
        assert torch.equal(mine, plain)
    assert all(pool.held_nbytes(one) == 0 for one in MEMORIES)


def test_a_state_changed_in_place_before_it_travels_is_refused(tmp_path: Path) -> None:
    class Spoiler(nn.Module):
        def forward(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            if spoiling:
                kept = run.travel.kept[0].state.tensors[0]
                kept.add_(1.0)
            return tuple(t * 2.0 for t in state)

    spoiling = False
    stages: list[nn.Module] = [Half(), Spoiler(), Half(), Half()]
    state, _ = take_apart(inputs())
    numbered = [Stage(k, s) for k, s in enumerate(stages)]
    _, traits, _ = profile_stages(numbered, state, CPU)
    actions: list[Action] = [Phase(PhaseKind.FORWARD), Keep(0), Forward(0, 2)]
    actions += [Offload(Value(Kind.STATE, 0), Tier.DEVICE, Tier.DISK)]
    pool = Pool(CPU, folder=DiskFolder(tmp_path), limits={}, pin=False)
    run = Interpreter(
        Schedule.of(actions, STAGES),
        Runner(numbered, traits, CPU),
        parcels=Parcels(pool, make_engine("threads", CPU)),
    )
    run.begin(state)
    spoiling = True
    with pytest.raises(GradientError, match="in-place"):
        run.run_phase(PhaseKind.FORWARD)
