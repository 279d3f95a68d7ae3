"""``tapestream clean``: what killed runs have left on the disk."""

from pathlib import Path

from tapestream.cli import show
from tapestream.errors import StorageError
from tapestream.frontends.saving.folder import Saves
from tapestream.storage.disk import PREFIX
from tapestream.storage.locked import dead_folders
from tapestream.system.files import taken_nbytes
from tapestream.units import format_nbytes


def cleaned(folder: Path, remove: bool, json_: bool) -> None:
    """List, or remove."""
    saves = Saves(folder)
    found = {path: _nbytes(path) for path in (*dead_folders(folder, PREFIX), *saves.unfinished())}
    if remove:
        for path in found:
            _remove(saves, path)
    if json_:
        show.as_json({"removed": remove, "found": {str(path): nbytes for path, nbytes in found.items()}})
        return
    if not found:
        show.line(f"Nothing in {folder} was left by runs that have ended.")
        return
    show.table(
        "left by runs that have ended", [(str(p), format_nbytes(n)) for p, n in found.items()], ("folder", "size")
    )
    total = format_nbytes(sum(found.values()))
    show.line(f"Removed: {total}." if remove else f"{total} in all; --remove removes them.")


def _remove(saves: Saves, path: Path) -> None:
    try:
        saves.remove(path)
    except OSError as error:
        raise StorageError(
            f"could not remove {path}: {error.strerror or error}; remove it as the user whose run it was"
        ) from error


def _nbytes(folder: Path) -> int:
    if folder.is_symlink():
        return 0
    return sum(taken_nbytes(path) for path in folder.rglob("*") if path.is_file())
