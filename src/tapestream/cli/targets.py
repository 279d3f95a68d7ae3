"""What a command is about, as far as can be told without PyTorch: sizes of GPTs, folders, Python functions."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapestream.cli.checks import check_dtype
from tapestream.cli.ends import importing
from tapestream.errors import InputError
from tapestream.models.shapes import GPT_SIZES

DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What the options say of a model; None where they are silent."""

    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    vocabulary: int | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str = "fp32"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The shape of a GPT."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


def is_function(target: str) -> bool:
    """Whether ``target`` is written as module:function."""
    return not Path(target).is_dir() and target.count(":") == 1


def is_folder(target: str) -> bool:
    """Whether ``target`` is a folder, or written as one."""
    return Path(target).is_dir() or "/" in target or target.startswith((".", "~"))


def check_target(target: str, wish: TargetOptions) -> None:
    """Raise InputError where ``target`` names nothing that there is, or options do not fit it. Imports the module of a
    Python function."""
    check_dtype(wish.dtype)
    if is_function(target):
        _check_sizes(target, wish)
        imported(target)
    elif is_folder(target):
        _check_sizes(target, wish)
        check_config(Path(target).expanduser())
    elif target.lower().startswith(("resnet", "dranet")):
        raise InputError(
            f"{target} was asked for: ResNets and DRANets are known by name to `tapestream train` alone; name "
            "module:factory, a Python function that returns (model, example_batch), the model from tapestream.models"
        )
    else:
        gpt_of(target, wish)


def _check_sizes(target: str, wish: TargetOptions) -> None:
    if wish.layers or wish.width or wish.heads or wish.vocabulary:
        raise InputError(f"{target} has its own size; leave --layers, --width, --heads and --vocabulary out")


def check_config(folder: Path) -> None:
    """Raise InputError where ``folder`` holds no Hugging Face configuration."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name one that holds a Hugging Face config.json")
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} holds no config.json; name a folder with that of a Hugging Face model (the weights are not "
            "needed), or module:factory"
        )


def gpt_of(target: str, wish: TargetOptions) -> GPTShape:
    """The GPT that ``target`` and the options name; a published size has as many positions as were published, and more
    where sequences are longer. Raises InputError as `gpt_shape` does."""
    if target != "gpt" and target.lower() not in GPT_SIZES:
        raise InputError(f"{_unknown(target)}; or name a folder with a Hugging Face config.json, or module:factory")
    context = (wish.sequence or DEFAULT_SEQUENCE) if target == "gpt" else None
    found = gpt_shape(target, wish.layers, wish.width, wish.heads, context=context, vocabulary=wish.vocabulary)
    return replace(found, context=max(found.context, wish.sequence or 0))


def gpt_shape(
    model: str, layers: int | None, width: int | None, heads: int | None, *, context: int | None, vocabulary: int | None
) -> GPTShape:
    """The GPT that the options name. Raises InputError where they are not enough or contradict each other."""
    if model != "gpt":
        if model.lower() not in GPT_SIZES:
            raise InputError(_unknown(model))
        if layers or width or heads:
            raise InputError(f"{model} has its own size; leave --layers, --width and --heads out, or write 'gpt'")
        own_layers, own_width, own_heads, own_context = GPT_SIZES[model.lower()]
        return GPTShape(own_layers, own_width, own_heads, vocabulary or 50257, context or own_context)
    if layers is None or width is None:
        raise InputError(
            "'gpt' needs --layers and --width, for example --layers 24 --width 1024; or name a size: gpt2-124m"
        )
    if heads is not None and width % heads:
        raise InputError(
            f"--width {width} was asked for, which is no multiple of --heads {heads}; the next multiple: --width "
            f"{width + heads - width % heads}"
        )
    return GPTShape(layers, width, heads or _heads(width), vocabulary or 50257, context or 2048)


def _unknown(name: str) -> str:
    return f"no GPT is named {name!r}; choose one of {', '.join(GPT_SIZES)}, or 'gpt' with --layers and --width"


def _heads(width: int) -> int:
    head = 64 if width < 2048 else 128
    return width // head if width % head == 0 else 1


def imported(target: str) -> Callable[[], Any]:
    """The function that ``module:function`` names. Raises InputError where there is none."""
    name, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would; an installed command does not look there
    try:
        with importing():
            module = importlib.import_module(name)
    except SyntaxError as error:
        raise InputError(
            f"{target}: {error.filename} has a syntax error in line {error.lineno}: {error.msg}; correct it"
        ) from error
    except Exception as error:
        raise InputError(
            f"{target}: module {name!r} cannot be imported ({type(error).__name__}: {error}); run the command in the "
            "folder where it lies, or set PYTHONPATH"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = ", ".join(n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
        raise InputError(f"{target}: {name} has no function {attribute!r}; it has {known or 'none'}")
    return factory  # type: ignore[no-any-return]
