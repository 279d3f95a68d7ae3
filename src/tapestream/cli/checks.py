"""What options say, checked before anything is made and without PyTorch: importing it takes longer than all of this."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from tapestream.errors import InputError
from tapestream.units import parse_flops, parse_nbytes, parse_rate

Number = TypeVar("Number", int, float)

DTYPES = ("fp32", "bf16")
OPTIMIZERS = (
    "adamw", "adam", "adagrad", "rmsprop", "sgd", "adadelta", "adamax", "asgd", "nadam", "radam", "rprop",
)  # fmt: skip
_OTHER_OPTIMIZERS = ("adafactor", "lbfgs", "muon", "sparseadam")
_PACKAGES = ("pytorch_optimizer", "timm", "bitsandbytes")
HOMES = ("auto", "device", "host", "disk")
_UPDATES = ("step", "backward")
_PICTURES = (
    "avif", "eps", "gif", "jpeg", "jpg", "pdf", "pgf", "png", "ps", "raw", "rgba", "svg", "svgz", "tif", "tiff", "webp",
)  # fmt: skip


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise InputError for a value that is not among those there are."""
    if value not in known:
        raise InputError(f"{option} {value} was asked for; it is {', '.join(known[:-1])} or {known[-1]}")


def check_dtype(dtype: str) -> None:
    """Raise InputError for a dtype that is not known."""
    one_of("--dtype", dtype, DTYPES)


def check_optimizer(name: str) -> None:
    """Raise InputError for an optimizer that `train` does not make."""
    one_of("--optimizer", name, OPTIMIZERS)


def may_be_optimizer(name: str) -> bool:
    """Whether an optimizer may have this name; where it may, only PyTorch, or the package that has it, can tell."""
    others = (*OPTIMIZERS, *_OTHER_OPTIMIZERS)
    return name.lower() in others or "." in name or any(importlib.util.find_spec(one) for one in _PACKAGES)


def check_planned(optimizer: str, update: str, where: str | None) -> None:
    """Raise InputError for an optimizer that surely nobody knows, and for a moment or place of updates that is not
    known."""
    if not may_be_optimizer(optimizer):
        raise InputError(
            f"--optimizer {optimizer} was asked for; it is {', '.join((*OPTIMIZERS, *_OTHER_OPTIMIZERS))}, one of "
            f"{' or '.join(_PACKAGES)} (none of them is installed), or package.Class"
        )
    check_update(update, where)


def check_update(update: str, where: str | None = None) -> None:
    """Raise InputError for a moment or place of updates that is not known."""
    one_of("--update", update, _UPDATES)
    one_of("--where", where or "auto", ("auto", "device", "host", "mixed"))


def size(option: str, text: str, *, least: int = 1) -> int:
    """Bytes. Raises InputError for what is no size, and for less than ``least``."""
    nbytes = _parsed(option, text, parse_nbytes)
    if nbytes < least:
        raise InputError(f"{option} {text} was asked for, which leaves no room for anything; give {option} 1GiB, say")
    return nbytes


def maybe_size(option: str, text: str | None, *, least: int = 1) -> int | None:
    """`size`, None where the option is not given."""
    return None if text is None else size(option, text, least=least)


def rate(option: str, text: str) -> float:
    """Bytes per second; a number too small to be meant so is asked for its unit."""
    found = _parsed(option, text, parse_rate)
    if found < 1e6 and text.strip()[-1].isdigit():
        raise InputError(f"{option} {text} was asked for: that is {text} bytes a second; if GB/s are meant, {text}GB/s")
    return found


def flops(text: str) -> float:
    """FLOP/s; a number too small to be meant so is asked for its unit."""
    found = _parsed("--flops", text, parse_flops)
    if found < 1e9 and text.strip()[-1].isdigit():
        raise InputError(f"--flops {text} was asked for, less than 1e9 FLOP/s; if TFLOP/s are meant, {text}T")
    return found


def updates(text: str) -> float:
    """Parameters that are updated in a second; a number too small to be meant so is asked for its unit."""
    try:
        found = parse_flops(text)
    except InputError:
        found = 0.0
    if found < 1e6:
        raise InputError(f"--host-update {text} was asked for; it is parameters a second: for two billion, 2e9")
    return found


def chunks(text: str | None) -> int | Literal["auto"] | None:
    """Of the loss. Raises InputError for what is neither "auto" nor a number."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--loss-chunks {text} was asked for; it is auto, or how many chunks, such as 8")
    return int(text)


def _parsed(option: str, text: str, parse: Callable[[str], Number]) -> Number:
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option} {text} was asked for: {error}") from error


def known_device(device: str) -> str | None:
    """The device that ``--device`` means, None where only PyTorch can tell. Raises InputError for one that is not known
    or that PyTorch, as it is installed, cannot have."""
    one_of("--device", device, ("auto", "cpu", "cuda"))
    if device == "cpu" or "torch" in sys.modules or not _for_cpu_alone():
        return "cpu" if device == "cpu" else None
    if device == "cuda":
        raise InputError("--device cuda was asked for, but PyTorch finds no GPU; use --device cpu")
    return "cpu"


def _for_cpu_alone() -> bool:
    """Whether the PyTorch that is installed was built without any kind of GPU, as its file of versions says."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return False
    try:
        text = (Path(found.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return False
    kinds = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *(.+?) *$", text, re.MULTILINE))
    return "cuda" in kinds and set(kinds.values()) == {"None"}


def check_homes(device: str | None, home: str, folder: Path | None, host_budget: str | None) -> None:
    """Raise InputError where blocks cannot live at ``home``, and for an option that has no effect there. ``device``:
    None where it is not known yet."""
    one_of("--home", home, HOMES)
    maybe_size("--host-budget", host_budget)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"--folder {folder} was asked for, but that is a file; name a folder")
    if home == "disk" and folder is None:
        raise InputError("--home disk was asked for without a folder; add --folder path/on/a/fast/disk")
    if home in ("device", "host") and folder is not None:
        no_effect("--folder", f"--home {home}", "use --home disk")
    if home == "device" and host_budget is not None:
        no_effect("--host-budget", "--home device")
    if device == "cpu" and home == "host":
        raise InputError(
            "--home host was asked for on the CPU, where RAM is the device; leave it out, or give --home disk "
            "--folder path/on/a/fast/disk"
        )
    if device == "cpu" and host_budget is not None:
        no_effect("--host-budget", "--device cpu, where --budget limits RAM")


def no_effect(option: str, beside: str, way: str = "") -> NoReturn:
    """Raises InputError: ``option`` has no effect beside another one."""
    raise InputError(f"{option} has no effect with {beside}; leave it out{way and f', or {way}'}")


def check_told(save: Path | None, plot: Path | None, *, suggest: bool, compare: bool) -> None:
    """Raise InputError where an answer cannot be written, drawn or shown as it was asked for."""
    if suggest and compare:
        no_effect("--suggest", "--compare")
    if save is not None:
        check_file(save)
    if plot is not None:
        check_picture(plot)


def check_picture(path: Path) -> None:
    """Raise InputError where no picture can be drawn at ``path``: before the work whose picture it is to be."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError('drawing needs matplotlib; install it with: pip install "tapestream[plots]"')
    ending = path.suffix[1:].lower()
    if ending and ending not in _PICTURES:  # without one, matplotlib adds its own
        raise InputError(f"cannot draw into {str(path)!r}: end its name in one of {', '.join(_PICTURES)}")
    check_file(path)


def check_file(path: Path) -> None:
    """Raise InputError where no file can be written at ``path``."""
    if not path.parent.is_dir():
        raise InputError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; create it")
    if path.is_dir():
        raise InputError(f"cannot write {str(path)!r}: it is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"cannot write {str(path)!r}: writing there is not permitted; choose another place")
