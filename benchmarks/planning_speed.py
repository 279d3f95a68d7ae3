"""Planning takes little time and memory: closed forms of a million equal steps, tables of many unequal stages.

Seconds are those of the plan and its first action, the median of the rounds. Planning is one thread that waits for
nothing, so the verdict is on the processor's seconds, which others on the machine disturb less. Python's memory is
traced in a run of its own, over the first 100,000 actions. Makespans are the judge's, beside a lower bound that no
schedule within the device budget beats: what the device cannot hold when the turn comes, and the link cannot carry out
and back, runs its forward once more (`tapestream.planners.least_seconds`).

Rows of the command are whole processes, start included: models that fit neither the card nor RAM, and one whose blocks
are loops over tokens. One without an answer after two minutes is a miss, and its seconds are those two minutes.
"""

import os
import random
import shlex
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

from benchmarks.common import Row, Settings, alternate, save, settings, yes
from tapestream.costs import Link, Machine, Profile, StageCost
from tapestream.ir import Schedule, Tier
from tapestream.planners import least_seconds, planners
from tapestream.simulate import simulate

TITLE = "Time and memory of planning"
SHARE = 0.25  # of the bytes with everything stored
_LISTED = 100_000
_PATIENCE = 120.0  # seconds for an answer of the command
_TIERS = "--dtype bf16 --gpu 24GiB --ram 64GiB --disk 16TiB --batch 4 --seq 2048 --update backward"
_ASKED: dict[str, tuple[str, float]] = {
    "GPT of 100 blocks, no room": (f"plan gpt --layers 100 --width 4096 {_TIERS}", 10),
    "GPT of 300 blocks, no room": (f"plan gpt --layers 300 --width 4096 {_TIERS}", 10),
    "GPT of 1,000 blocks, no room": (f"plan gpt --layers 1000 --width 2048 {_TIERS}", 10),
    "GPT of 100,000 blocks, no room": (f"plan gpt --layers 100000 --width 256 {_TIERS}", 10),
    "the shape of Llama-405B, disk": (
        "plan ./llama-405b --dtype bf16 --gpu 80GiB --ram 512GiB --disk 16TiB --batch 1 --seq 4096 "
        "--update backward", 10,
    ),
    "Mamba-130m, 2,048 tokens": ("plan ./mamba-130m --gpu 4GiB --batch 1 --seq 2048", 10),
    "Gemma-2 9B, every planner": (
        "plan ./gemma-2 --dtype bf16 --gpu 48GiB --ram 128GiB --disk 1TiB --batch 4 --seq 2048 --compare", 20,
    ),
}  # fmt: skip
"""What is asked, and within how many seconds an answer is claimed."""
_CLOSED = {
    "store_all": {}, "periodic": {}, "bisection": {}, "revolve": {"slots": 20}, "binomial": {"slots": 20},
    "periodic_disk_revolve": {"slots": 20}, "double": {}, "async_multistage": {"slots": 20},
}  # fmt: skip


def main() -> None:
    """Measure all."""
    chosen = settings("cpu", rounds=3)
    save("planning_speed", TITLE, chosen, rows(chosen), share=SHARE)


def rows(chosen: Settings) -> Iterator[Row]:
    """Row by row."""
    quick = chosen.quick
    n = 10_000 if quick else 1_000_000
    profile = Profile.uniform(n)
    machine = _machine(profile)
    for name, knobs in _CLOSED.items():

        def planned(name: str = name, knobs: dict[str, int] = knobs) -> Schedule:
            return planners[name](profile, None, machine, **knobs)

        yield {**_timed(name, "equal steps", n, planned, chosen, 0.1), **_memory(planned)}
    chain = unequal(1000 if quick else 1_000_000)
    yield _timed("least_peak", "unequal stages", len(chain), lambda: planners["least_peak"](chain), chosen, 2.0)
    cases = [(unequal(40), 2.0)] if quick else [(unequal(200), 2.0), (unequal(2000), 10.0), (resnet(), 20.0)]
    for chain, seconds in cases:
        for name in ("rotor", "joint"):
            if name in planners:
                yield _within(name, chain, chosen, seconds)

    asked = list(_ASKED.items())[:1] if quick else list(_ASKED.items())
    with tempfile.TemporaryDirectory(prefix="planning-speed-") as folder:
        _write_configurations(Path(folder))
        for what, (command, limit) in asked:
            yield _answer(what, command, limit, Path(folder))


def _write_configurations(folder: Path) -> None:
    """The shapes of published models."""
    from transformers import Gemma2Config, LlamaConfig, MambaConfig

    shapes = {
        "llama-405b": LlamaConfig(
            hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        ),
        "mamba-130m": MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280),
        "gemma-2": Gemma2Config(
            hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, vocab_size=256000,
        ),
    }  # fmt: skip
    for name, shape in shapes.items():
        shape.save_pretrained(folder / name)


def _answer(what: str, command: str, claim: float, folder: Path) -> Row:
    words = [sys.executable, "-m", "tapestream.cli.app", *shlex.split(command)]
    began, before = perf_counter(), os.times()
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, timeout=_PATIENCE, check=False)
        fits = "yes" if done.returncode == 0 else "no"
    except subprocess.TimeoutExpired:
        fits = "no answer"
    seconds, after = perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "planner": "auto" if "--compare" not in command else "all", "what": what, "seconds": round(seconds, 2),
        "processor seconds": round(cpu, 2), "fits": fits, "claim": f"under {claim:g}",
        "met": yes(fits == "yes" and cpu < claim), "command": f"tapestream {command}",
    }  # fmt: skip


def unequal(n: int, seed: int = 0) -> Profile:
    """``n`` stages that differ in everything."""
    draw = random.Random(seed)
    stages = tuple(
        StageCost(forward := draw.uniform(0.5, 1.5), forward * draw.uniform(1.5, 2.5), draw.randint(1000, 4000),
                  draw.randint(4000, 20_000))
        for _ in range(n)
    )  # fmt: skip
    return Profile(stages, 2000)


def resnet(blocks: int = 41_667) -> Profile:
    """A CIFAR ResNet of 6 x ``blocks`` stages: three resolutions, two convolutions with norm and activation a block."""
    kinds = [
        [StageCost(1.0, 2.0, nbytes, 2 * nbytes), StageCost(1.05, 2.15, nbytes, 2 * nbytes + nbytes // 2)]
        for nbytes in (65_536, 32_768, 16_384)
    ]
    return Profile(tuple(cost for pair in kinds for _ in range(blocks) for cost in pair), 65_536)


def _machine(profile: Profile) -> Machine:
    """Links to the host and back, each of which carries a quarter of the tape in the time of the forwards."""
    cost = profile.stages[0] if profile.is_uniform else None
    stages = [cost] if cost is not None else profile.stages
    tape, seconds = sum(each.saved_nbytes for each in stages), sum(each.forward_seconds for each in stages)
    link = Link(tape / seconds / 4)
    return Machine({(Tier.DEVICE, Tier.HOST): link, (Tier.HOST, Tier.DEVICE): link})


def _timed(
    name: str, what: str, n: int, planned: Callable[[], Schedule], chosen: Settings, claim: float
) -> Row:  # fmt: skip
    timings = alternate({name: lambda: next(iter(planned()))}, chosen.rounds, "cpu", warm=0)
    seconds, cpu = timings.seconds(name), sorted(timings.cpu[name])[chosen.rounds // 2]
    return {
        "planner": name, "stages": n, "what": what, "seconds": round(seconds, 4), "processor seconds": round(cpu, 4),
        "claim": f"under {claim:g}", "met": yes(cpu < claim),
    }  # fmt: skip


def _memory(planned: Callable[[], Schedule]) -> Row:
    tracemalloc.start()
    for _ in islice(iter(planned()), _LISTED):
        pass
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return {"MB": round(peak, 2), "MB claim": "under 50", "MB met": yes(peak < 50)}


def _within(name: str, profile: Profile, chosen: Settings, claim: float) -> Row:
    """A quarter of what everything stored takes; `rotor` does not use the link, so its bound has none."""
    stored = simulate(planners["store_all"](profile), profile)
    budget = round(SHARE * stored.peak_nbytes[Tier.DEVICE])
    machine = _machine(profile)
    made: list[Schedule] = []

    def planned() -> Schedule:
        made.append(planners[name](profile, budget, machine))
        return made[-1]

    what = f"{len(set(profile.stages))} kinds" if len(profile) > 10_000 else "unequal stages"
    row = _timed(name, what, len(profile), planned, chosen, claim)
    seconds = simulate(made[-1], profile, machine).makespan_seconds
    bound = least_seconds(profile, budget, Machine() if name == "rotor" else machine)
    return {
        **row, "budget of stored": SHARE, "overhead": round(seconds / stored.makespan_seconds, 4),
        "least overhead": round(bound / stored.makespan_seconds, 4), "over the bound": f"{seconds / bound - 1:.1%}",
        "bound claim": "at most 5%" if len(profile) > 10_000 else "",
        "bound met": yes(seconds <= 1.05 * bound) if len(profile) > 10_000 else "",
    }  # fmt: skip


if __name__ == "__main__":
    main()
