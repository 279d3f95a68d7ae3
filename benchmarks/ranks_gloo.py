"""Several processes that train one streamed model on gloo, beside DistributedDataParallel and FSDP2 in the same run.

A step is zero_grad, forward, backward and AdamW, each rank with a batch of its own and one thread. Ours: a copy on each
rank, beside DistributedDataParallel, and one copy that is divided, beside FSDP2; each in memory, and with the home on
disk within a budget. ``same bits``: the weights after all steps are those of DistributedDataParallel (whose sums have
other bits for more than two ranks). On as many ranks as the machine has cores, and on more, which take turns.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import Row, Settings, Timings, alternate, milliseconds, same_bits, save, settings, yes
from benchmarks.networks import Case, Network, gpt
from benchmarks.ranks import in_ranks, stepper

TITLE = "Several processes, beside DistributedDataParallel and FSDP2 on gloo"
BUDGET = "96MiB"
AVERAGED, SHARDED = "DistributedDataParallel", "FSDP2"


def main() -> None:
    """Measure on two and four ranks."""
    chosen = settings(rounds=9)
    rows = (row for ranks in ((2,) if chosen.quick else (2, 4)) for row in measure(ranks, chosen))
    save("ranks_gloo", TITLE, chosen, rows, optimizer="AdamW (for-loop)", budget_on_disk=BUDGET)


def measure(ranks: int, chosen: Settings) -> list[Row]:
    """Rows of the first rank."""
    rows, *_ = in_ranks(ranks, chosen.folder, _measured, chosen)
    return cast("list[Row]", rows)


def _measured(rank: int, ranks: int, folder: str, chosen: Settings) -> list[Row]:
    case = gpt(2, 64, 2, 32, "cpu") if chosen.quick else gpt(6, 512, 4, 128, "cpu")
    networks: dict[str, Network] = {}
    with ExitStack() as undo:
        steps = dict(_contenders(rank, case, Path(folder), networks, undo))
        timings = alternate(steps, chosen.rounds, "cpu")
        return [_row(case, ranks, name, timings, networks) for name in steps if name != AVERAGED]


def _row(case: Case, ranks: int, name: str, timings: Timings, networks: dict[str, Network]) -> Row:
    beside = SHARDED if "divided" in name else AVERAGED
    row: Row = {"network": case.name, "ranks": ranks, "with": name, "beside": beside}
    row |= {"its ms": milliseconds(timings.seconds(beside)), "ms": milliseconds(timings.seconds(name))}
    row |= timings.ratio(name, beside)
    if not name.startswith("ts.stream"):
        return row
    if name.endswith("in memory"):
        row |= {"claim": "at most 1.00", "met": yes(row["ratio"] <= 1.0)}
    with ts.whole(networks[name]):
        ours = [p.detach().clone() for p in networks[name].parameters()]
    return row | {"same bits": yes(same_bits(ours, list(networks[AVERAGED].parameters())))}


def _contenders(
    rank: int, case: Case, folder: Path, networks: dict[str, Network], undo: ExitStack
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each trains a network of its own."""
    network = networks[AVERAGED] = case.network()
    yield AVERAGED, stepper(rank, case, nn.parallel.DistributedDataParallel(network), _plain(network))
    from torch.distributed.fsdp import fully_shard

    network = case.network()
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    yield SHARDED, stepper(rank, case, network, _plain(network))
    in_memory = {"home": "device", "budget": "16GiB"}
    on_disk = {"home": "disk", "budget": BUDGET, "folder": folder}
    for name, options, divided in (
        ("ts.stream, a copy each, in memory", in_memory, False),
        (f"ts.stream, a copy each, on disk within {BUDGET}", on_disk, False),
        ("ts.stream, divided, in memory", in_memory, True),
        (f"ts.stream, divided, on disk within {BUDGET}", on_disk, True),
    ):
        network = networks[name] = case.network()
        ts.stream(network, device="cpu", peers=ts.Peers(shard=divided), **options)  # type: ignore[arg-type]
        undo.callback(ts.unstream, network)
        yield name, stepper(rank, case, network, ts.optimizer(network, torch.optim.AdamW, foreach=False))


def _plain(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), foreach=False)


if __name__ == "__main__":
    main()
