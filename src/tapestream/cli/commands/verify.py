"""The options of ``tapestream verify``."""

from typing import Annotated

import typer

from tapestream.cli import checks
from tapestream.cli.ends import importing, reported
from tapestream.cli.options import (
    Blocks,
    Budget,
    Device,
    Dtype,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Layers,
    Samples,
    Steps,
    Target,
    Tokens,
    Vocabulary,
    Width,
)


@reported
def verify(
    target: Target = "gpt",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    seq: Tokens = None,
    batch: Samples = None,
    vocabulary: Vocabulary = None,
    dtype: Dtype = "fp32",
    blocks: Blocks = None,
    budget: Budget = None,
    host_budget: HostBudget = None,
    home: Home = "auto",
    folder: Folder = None,
    device: Device = "auto",
    steps: Steps = 3,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: divide one copy among the processes.")
    ] = False,
    json_: Json = False,
) -> None:
    """Compare steps within a budget with the same in plain PyTorch, bit for bit; under torchrun, in all of its
    processes. Exit status 1: some bit differs."""
    from tapestream.cli.targets import TargetOptions, check_target

    checks.maybe_size("--budget", budget)
    checks.check_homes(checks.known_device(device), home, folder, host_budget)
    wish = TargetOptions(layers, width, heads, vocabulary, batch, seq, dtype, tuple(blocks or ()))
    check_target(target, wish)
    with importing():
        from tapestream.cli.verify import verified
    verified(target, wish, device, budget, host_budget, home, folder, steps, json_, shard)
