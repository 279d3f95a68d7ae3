"""Options that several commands share, so that they are called and explained alike, and how commands end."""

import errno
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import torch
import typer

from tapestream.accelerator.device import is_present
from tapestream.cli import show
from tapestream.errors import InputError, TapestreamError
from tapestream.models import GPTConfig

P = ParamSpec("P")
R = TypeVar("R")

Model = Annotated[
    str,
    typer.Argument(
        help="gpt, resnet or dranet with --layers and --width, or a published size: gpt3-175b, resnet50, dranet101."
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        help="'gpt' with --layers and --width, a published size such as gpt3-175b, a folder with a Hugging Face "
        "config.json, or module:factory, a Python function that returns an nn.Module or (module, example_batch).",
    ),
]
Layers = Annotated[int | None, typer.Option(help="Transformer blocks.")]
Width = Annotated[int | None, typer.Option(help="Numbers per token between blocks.")]
TrainedLayers = Annotated[
    int | None, typer.Option("--layers", help="Transformer blocks, or layers of a ResNet as papers count them: 250002.")
]
TrainedWidth = Annotated[
    int | None, typer.Option("--width", help="Numbers per token between blocks, or channels of a ResNet's first stage.")
]
Heads = Annotated[int | None, typer.Option(help="Attention heads; by default of size 64, from width 2048 on 128.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read images beside this one; by default none.")
]
Budget = Annotated[str | None, typer.Option(help="Bytes allowed on the device, such as 12GiB.")]
HostBudget = Annotated[str | None, typer.Option(help="Bytes allowed in RAM when the device is a GPU.")]
Home = Annotated[str, typer.Option(help="Where blocks live between uses: auto, device, host or disk.")]
Folder = Annotated[Path | None, typer.Option(help="Folder on the disk where blocks live; emptied at the end.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text: a folder or file, or stdlib, Python's own library. Images: a folder with one subfolder per class, "
        "or digits, scikit-learn's. Segmentation: a folder with images and masks, or shapes, which are drawn.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Samples = Annotated[
    int | None, typer.Option("--batch", min=1, help="Samples per step; by default 1, or the example's.")
]
Tokens = Annotated[
    int | None, typer.Option("--seq", min=1, help="Tokens per sequence; by default 2048, or what the model has.")
]
Vocabulary = Annotated[int | None, typer.Option(min=1, help="Tokens known to a GPT; by default GPT-2's 50257.")]
Blocks = Annotated[
    list[str] | None,
    typer.Option(help="Class or name of the blocks to stream, where they are not found; may be repeated."),
]
Dtype = Annotated[str, typer.Option(help="fp32 or bf16 (with fp32 masters).")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Batch = Annotated[
    int | None, typer.Option(min=1, help="Samples per step; by default 2 sequences, 16 images, 4 for segmentation.")
]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; by default 256.")]
Size = Annotated[int | None, typer.Option(min=4, help="Pixels of an image's side.")]
Classes = Annotated[int | None, typer.Option(min=2, help="Labels in the masks of a folder.")]
Optimizer = Annotated[str, typer.Option(help="adamw, adam, adagrad, rmsprop or sgd.")]
Update = Annotated[
    str, typer.Option(help="step: update after backward. backward: update each block as its gradient arrives.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=2**63 - 1, help="Of initial values, dropout and the order of data: equal seeds give equal runs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def make_config(
    model: str,
    layers: int | None,
    width: int | None,
    heads: int | None,
    *,
    context: int | None,
    vocabulary: int | None,
    dtype: torch.dtype = torch.float32,
) -> GPTConfig:
    """The GPT that the options name. Raises InputError where they are not enough or contradict each other."""
    if model != "gpt":
        named = GPTConfig.named(model)
        if layers or width or heads:
            raise InputError(f"{model} has its own size; leave --layers, --width and --heads out, or write 'gpt'")
        return GPTConfig(
            named.layers,
            named.width,
            named.heads,
            vocabulary or named.vocabulary,
            context or named.context,
            dtype=dtype,
        )
    if layers is None or width is None:
        raise InputError(
            "'gpt' needs --layers and --width, for example --layers 24 --width 1024; or name a size: gpt2-124m"
        )
    return GPTConfig(layers, width, heads or _heads(width), vocabulary or 50257, context or 2048, dtype=dtype)


def _heads(width: int) -> int:
    head = 64 if width < 2048 else 128
    return width // head if width % head == 0 else 1


def chosen_device(device: str) -> str:
    """``auto`` becomes cuda where PyTorch finds a GPU. Raises InputError for a device that is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device} was asked for; it is auto, cpu or cuda")
    there = is_present(torch.device("cuda"))
    if device == "cuda" and not there:
        raise InputError("--device cuda was asked for, but PyTorch finds no GPU; use --device cpu")
    return device if device != "auto" else "cuda" if there else "cpu"


def chosen_dtype(dtype: str) -> torch.dtype:
    """The dtype of ``--dtype``. Raises InputError for one that is not known."""
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} was asked for; --dtype is {' or '.join(DTYPES)}")
    return DTYPES[dtype]


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO)


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Ends a command as people and scripts expect: exit 2 and one red line for tapestream's own errors, 130 for Ctrl-C.

    SIGTERM (exit 143) is taken as Ctrl-C, so that both leave by way of Python's own end, where home files are removed.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _on_sigterm(interrupt)
        try:
            return command(*args, **kwargs)
        except TapestreamError as error:
            show.failure(str(error))
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what waits to be written would fail again at the end
            show.failure(f"cannot write what was to be shown: {error.strerror}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            show.failure("stopped")
            number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from error
        finally:
            _on_sigterm(before)

    return run


def _on_sigterm(handler: Any) -> Any:
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not in the main thread, where signals are nobody's business
        return None


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken as Ctrl-C."""


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """A handler of signals that end a command."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
