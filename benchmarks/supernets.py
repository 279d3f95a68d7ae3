"""SuperNeurons' claims: liveness, offload and cost-aware recompute bring the peak down to one layer's working set, and
let a ResNet be at least 3.24 times as deep as plain PyTorch's in equal memory (Wang et al. 2018).

Every network is a chain of basic layers under the least budget of each technique, run for one step: planned peak and
measured one, bytes moved, the bits. "none" is what all outputs, saved tensors and cotangents take together, computed;
"liveness" is plain PyTorch. Peaks do not count parameters, nor their gradients, as in the paper. What is measured does
hold gradients, since they go to the user, and stands beside the peak that the same schedule has with them; both claims
must hold: the planned peak is the largest working set, and the measured one is what was planned. With ``--figure FILE``
the picture of a result file is drawn and nothing measured.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, mebibytes, peak_nbytes, same_bits, save, settings, yes
from benchmarks.layered import Layered, alexnet, densenet, heavy_of, inception, resnet, vgg16
from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError
from tapestream.ir import Schedule, Tier
from tapestream.planners import planners
from tapestream.planners._heavy import peak_of_one_backward
from tapestream.planning.picture import figure_of, saved
from tapestream.simulate import simulate

TITLE = "Peak memory of a step by technique, and the deepest ResNet in equal memory (SuperNeurons)"
LEAST = 3.24
_ROOM = 1.05  # of measured peaks beside planned ones


@dataclass(frozen=True, slots=True)
class Technique:
    """A planner with its knobs; ``moves``: towards the disk too."""

    name: str
    planner: str
    moves: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)


OFFLOAD = Technique("offload", "offload", True)
COST_AWARE = Technique("offload, recompute: cost-aware", "superneurons", True, {"recompute": "cost_aware"})
TECHNIQUES = (
    Technique("liveness", "store_all"),
    OFFLOAD,
    Technique("recompute: speed", "superneurons", False, {"recompute": "speed"}),
    Technique("recompute: memory", "superneurons", False, {"recompute": "memory"}),
    Technique("recompute: cost-aware", "superneurons", False, {"recompute": "cost_aware"}),
    COST_AWARE,
)


def main() -> None:
    """All networks, then the deepest ResNet; or the picture alone."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--figure", type=Path)
    given, _ = parser.parse_known_args()
    if given.figure is not None:
        draw(json.loads((RESULTS / "supernets.json").read_text())["rows"], given.figure)
        return
    chosen = settings("cpu")
    machine = ts.measure_machine("cpu", chosen.folder)
    save("supernets", TITLE, chosen, rows(chosen, machine))


def rows(chosen: Settings, machine: Machine) -> Iterator[Row]:
    """One for each network and technique, and one for the deepest ResNet."""
    for case in cases(chosen.quick):
        yield from _rows(case, machine, chosen.folder)
    yield deepest(chosen.quick, machine, chosen.folder)


def cases(quick: bool) -> list[Layered]:
    """The five networks of the paper; ``quick``: narrow and small."""
    if quick:
        return [
            Layered("AlexNet", lambda: alexnet(6, 32), (2, 3, 64, 64)),
            Layered("Inception-v4-like", lambda: inception(2, (1, 1, 1)), (2, 3, 32, 32)),
            Layered("DenseNet", lambda: densenet(4, (2, 2)), (2, 3, 16, 16)),
        ]
    return [
        Layered("AlexNet", lambda: alexnet(96, 512), (16, 3, 224, 224)),
        Layered("VGG-16", lambda: vgg16(64, 512, 3), (8, 3, 96, 96)),
        Layered("ResNet-50", lambda: resnet(64, (3, 4, 6, 3)), (8, 3, 32, 32)),
        Layered("Inception-v4-like", lambda: inception(16, (4, 7, 3)), (8, 3, 64, 64)),
        Layered("DenseNet-121", lambda: densenet(32, (6, 12, 24, 16)), (8, 3, 32, 32)),
    ]


# -- one network, all techniques ---------------------------------------------------------------------------------------


def _rows(case: Layered, machine: Machine, folder: str) -> Iterator[Row]:
    theirs, images = Network(case.layers()), case.images()
    wanted = _gradients(theirs, images, theirs.plain)
    profile = theirs.profile(images)
    everything = sum(
        cost.output_nbytes + cost.saved_nbytes + (cost.cotangent_nbytes or 0) for cost in profile.stages
    )  # fmt: skip
    with_gradients = theirs.profile(images, gradients=True)
    working_set = peak_of_one_backward(profile)
    first = {"network": case.name, "layers": len(profile), "largest working set MiB": mebibytes(working_set)}
    yield {**first, "technique": "none (computed)", "planned peak MiB": mebibytes(everything)}
    for technique in TECHNIQUES:
        network = Network(case.layers())
        schedule, least = leanest(profile, technique, machine, network)
        chain, found = network.under(least, technique, machine, folder, images)
        links = machine if technique.moves else Machine()
        judged = simulate(schedule, profile, links, Budget(least))
        expected = simulate(schedule, with_gradients, links).peak_nbytes[Tier.DEVICE]
        same = same_bits(found, wanted)
        measured = network.peak_nbytes(images, chain)
        row: Row = {
            **first, "technique": technique.name, "planned peak MiB": mebibytes(least),
            "planned with gradients MiB": mebibytes(expected), "measured with gradients MiB": mebibytes(measured),
            "forwards": judged.forwards,
            "MiB to disk": mebibytes(judged.bytes_moved.get((Tier.DEVICE, Tier.DISK), 0)),
            "planned peak, of the working set": round(least / working_set, 3), "same bits": yes(same),
        }  # fmt: skip
        if technique is COST_AWARE:
            row |= {
                "claim": "peak at most 1.05 times the largest working set, measured at most 1.05 times planned",
                "met": yes(least <= _ROOM * working_set and measured <= _ROOM * expected),
            }
        yield row


class Network(nn.Module):
    """Layers in a row and the loss of what they give."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def plain(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One layer after the other, everything stored."""
        for layer in self.layers:
            state = layer(state)
        return state

    def step(self, images: Tensor, run: Callable[[Any], Any]) -> None:
        """Forward and backward."""
        torch.manual_seed(2)
        run((images,))[0].square().mean().backward()

    def profile(self, images: Tensor, *, gradients: bool = False) -> Profile:
        """Costs of all layers, measured; with those of their ``gradients``."""
        chain = ts.Chain(list(self.layers), planner="store_all", gradients_within=gradients)
        with torch.random.fork_rng(devices=[]):
            chain((images,))
        assert chain.plan is not None
        return chain.plan.profile

    def under(
        self, budget: int, technique: Technique, machine: Machine, folder: str, images: Tensor
    ) -> tuple[ts.Chain, list[Tensor | None]]:
        """A chain within ``budget``, and the gradients of a step of it."""
        tiers: dict[str, Any] = {"folder": folder, "machine": machine} if technique.moves else {}
        chain = ts.Chain(
            list(self.layers), budget=budget, planner=technique.planner, **tiers, **self.knobs(technique)
        )  # fmt: skip
        return chain, _gradients(self, images, chain)

    def knobs(self, technique: Technique) -> dict[str, Any]:
        """With the layers that the paper takes for heavy."""
        heavy = {"heavy": heavy_of(list(self.layers))} if technique.planner == "superneurons" else {}
        return {**technique.knobs, **heavy}

    def peak_nbytes(self, images: Tensor, run: Callable[[Any], Any]) -> int:
        """Of one step, measured, gradients included."""
        for _ in range(2):  # what a step frees is seen only if the one that made it was metered
            self.zero_grad()
            found = peak_nbytes(lambda: self.step(images, run), "cpu")
        return found


def _gradients(network: Network, images: Tensor, run: Callable[[Any], Any]) -> list[Tensor | None]:
    network.zero_grad()
    network.step(images, run)
    found = [p.grad for p in network.parameters()]
    network.zero_grad()
    return found


def leanest(profile: Profile, technique: Technique, machine: Machine, network: Network) -> tuple[Schedule, int]:
    """The schedule of the least budget that a technique takes, and that budget."""
    plan, below = planners[technique.planner], machine if technique.moves else Machine()  # without any link
    knobs = network.knobs(technique)
    try:
        plan(profile, Budget(1), below, **knobs)
    except BudgetError as error:
        least = error.least_nbytes
        assert least is not None
        return plan(profile, Budget(least), below, **knobs), least
    raise AssertionError("a budget of one byte was enough")


# -- the deepest ResNet ------------------------------------------------------------------------------------------------


def deepest(quick: bool, machine: Machine, folder: str) -> Row:
    """Bottleneck ResNets of batch 16 that are deeper in their third size, in the memory that plain PyTorch takes, with
    weights and gradients, for one with a few blocks there. The depth is planned, and less where a step takes more."""
    width, size, blocks = (4, 8, 3) if quick else (16, 32, 24)
    images = _images(size)
    shallow = _resnet(width, blocks)
    allowed = _step_nbytes(shallow, images, shallow.plain)
    planned = most = _deepest_planned(width, size, allowed, machine)
    while True:
        network = _resnet(width, most)
        chain = ts.Chain(
            list(network.layers), budget=allowed - _nbytes(network), gradients_within=True, folder=folder,
            machine=machine, planner=COST_AWARE.planner, **network.knobs(COST_AWARE),
        )  # fmt: skip
        measured = _step_nbytes(network, images, chain)
        if measured <= allowed or most <= blocks:
            break
        most -= max(1, most // 20)
    fine = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
    ratio = round(_layers(most) / _layers(blocks), 3)
    return {
        "network": f"bottleneck ResNet, batch 16, {size} x {size}", "technique": COST_AWARE.name,
        "MiB allowed with weights and gradients": mebibytes(allowed), "measured MiB": mebibytes(measured),
        "layers planned": _layers(planned), "layers": _layers(most), "layers of plain PyTorch": _layers(blocks),
        "ratio": ratio, "gradients finite": yes(fine), "claim": f"at least {LEAST} times as deep",
        "met": yes(ratio >= LEAST and fine and measured <= allowed),
    }  # fmt: skip


def _nbytes(network: nn.Module) -> int:
    return sum(p.nbytes for p in network.parameters())


def _step_nbytes(network: Network, images: Tensor, run: Callable[[Any], Any]) -> int:
    """Weights and the peak of a step, gradients included."""
    network.step(images, run)  # profiles
    return _nbytes(network) + network.peak_nbytes(images, run)


def _layers(blocks: int) -> int:
    """Convolutions and products of such a ResNet, as its name counts them."""
    return 3 * (3 + 4 + blocks + 3) + 2


def _resnet(width: int, blocks: int) -> Network:
    torch.manual_seed(0)
    return Network(resnet(width, (3, 4, blocks, 3)))


def _images(size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, 3, size, size)


def _deepest_planned(width: int, size: int, allowed: int, machine: Machine) -> int:
    """Blocks of the third size, by bisection over depths whose costs are those of a shallow one, repeated."""
    few = 4
    profile = _resnet(width, few).profile(_images(size))
    layers = [resnet(width, (3, 4, blocks, 3)) for blocks in (few, few + 1)]
    each = len(layers[1]) - len(layers[0])
    start = len(resnet(width, (3, 4, few, 0))) - 3 - each  # the head has three; the last block of the third size
    shallow, deep = (_nbytes(nn.ModuleList(one)) for one in layers)
    block_nbytes, fixed_nbytes = deep - shallow, shallow - few * (deep - shallow)

    def fits(blocks: int) -> bool:
        room = allowed - 2 * (fixed_nbytes + blocks * block_nbytes)
        if room <= 0:
            return False
        deep = deeper(profile, start, each, blocks - few)
        with torch.device("meta"):
            network = Network(resnet(width, (3, 4, blocks, 3)))
        try:
            planners[COST_AWARE.planner](deep, Budget(room), machine, **network.knobs(COST_AWARE))
        except BudgetError:
            return False
        return True

    low, high = few, 2 * few
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def deeper(profile: Profile, start: int, count: int, times: int) -> Profile:
    """``profile`` with its stages from ``start`` on, ``count`` of them, ``times`` more times."""
    stages, end, by = list(profile.stages), start + count, count * times
    carried = [c for c in profile.carried if c.first < end]
    inside = [c for c in profile.carried if start <= c.first and c.last <= end]
    carried += [type(c)(c.first + k * count, c.last + k * count, c.nbytes) for k in range(1, times + 1) for c in inside]
    carried += [type(c)(c.first + by, c.last + by, c.nbytes) for c in profile.carried if c.first >= end]
    return Profile(
        (*stages[:end], *(stages[start:end] * times), *stages[end:]), profile.initial_nbytes,
        carried=tuple(carried), outside_nbytes=profile.outside_nbytes,
    )  # fmt: skip


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(found: Sequence[Row], path: Path) -> None:
    """Planned peaks by network and technique, as shares of those with liveness."""
    table = [row for row in found if "planned peak MiB" in row]
    networks = list(dict.fromkeys(row["network"] for row in table))
    techniques = list(dict.fromkeys(row["technique"] for row in table))
    peaks = {(row["network"], row["technique"]): row["planned peak MiB"] for row in table}
    figure = figure_of(11, 5)
    axis = figure.subplots()
    width = 0.8 / len(techniques)
    for place, technique in enumerate(techniques):
        shares = [peaks[network, technique] / peaks[network, "liveness"] for network in networks]
        at = [k + width * (place - (len(techniques) - 1) / 2) for k in range(len(networks))]
        axis.bar(at, shares, width, label=technique)
    sets = {row["network"]: row["largest working set MiB"] for row in table}
    for k, network in enumerate(networks):
        share = sets[network] / peaks[network, "liveness"]
        axis.hlines(
            share, k - 0.45, k + 0.45, color="black", linestyle="--", label=None if k else "largest working set"
        )
    axis.set_xticks(range(len(networks)), networks)
    axis.set_ylabel("peak, of that of plain PyTorch")
    axis.legend(fontsize="small")
    saved(figure, path)


if __name__ == "__main__":
    main()
