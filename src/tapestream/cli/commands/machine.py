"""The options of ``tapestream machine``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli import checks
from tapestream.cli.ends import importing, reported
from tapestream.cli.options import Device, Folder, Json
from tapestream.errors import InputError


@reported
def machine(
    folder: Folder = None,
    device: Device = "auto",
    save: Annotated[
        Path | None,
        typer.Option(help="File to write the result to, with RAM and free disk, for `tapestream plan --machine`."),
    ] = None,
    json_: Json = False,
) -> None:
    """Measure links, disk and FLOP/s of this machine, in a few seconds."""
    checks.known_device(device)
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder {folder} was asked for, but there is no such folder; create it or give another")
    if save is not None:
        checks.check_file(save)
    with importing():
        from tapestream.cli.machine import measured
    measured(device, folder, save, json_)
