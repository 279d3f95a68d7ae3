"""The options of ``tapestream demo``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli import checks
from tapestream.cli.ends import importing, reported
from tapestream.cli.options import Device
from tapestream.errors import InputError


@reported
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a smaller demo, in under a minute, and compare it bit for bit.")
    ] = False,
    device: Device = "auto",
    budget: Annotated[str | None, typer.Option(help="Bytes allowed; 1GiB by default, 96MiB with --quick.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
) -> None:
    """Train a GPT under a hard memory limit in which plain PyTorch fails."""
    checks.known_device(device)
    checks.maybe_size("--budget", budget)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    with importing():
        from tapestream.cli.demo import shown
    shown(quick, device, budget, out)
