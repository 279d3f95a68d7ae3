"""The options of ``tapestream clean``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli.ends import importing, reported
from tapestream.cli.options import Json
from tapestream.errors import InputError

Remove = Annotated[bool, typer.Option("--remove", help="Remove what is listed.")]
Where = Annotated[Path, typer.Argument(help="A folder that was given as --folder or --saves.", show_default=False)]


@reported
def clean(folder: Where, remove: Remove = False, json_: Json = False) -> None:
    """List, or remove, home files and unfinished saves of runs that are gone. Nothing else is touched."""
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is no folder; name one that was given as --folder or --saves")
    with importing():
        from tapestream.cli.clean import cleaned
    cleaned(folder, remove, json_)
