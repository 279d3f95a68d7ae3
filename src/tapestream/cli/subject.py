"""What a command is about: one of our GPTs, a Hugging Face configuration, or what a Python function returns."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.cli import huggingface
from tapestream.cli.options import chosen_dtype, make_config
from tapestream.errors import InputError
from tapestream.models import GPT, GPTConfig

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: by position, by name."""

DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be made and how it is called; both on PyTorch's default device of the moment.

    ``make``: the model, in train mode. ``arguments``: of a call with so many samples. ``batch``: samples of a step.
    ``sequence``: tokens per sample, None where samples are no sequences of tokens. ``config``: of our own GPTs.
    ``blocks``: names of its blocks or their classes; empty where they are to be found.
    """

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[int], Arguments]
    batch: int
    sequence: int | None
    config: GPTConfig | None = None
    blocks: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What is counted per second."""
        return "samples" if self.sequence is None else "tokens"

    def step(self, batch: int) -> str:
        """``"4 x 1024 tokens"``, ``"4 samples"``."""
        return f"{batch} samples" if self.sequence is None else f"{batch} x {self.sequence} tokens"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the options say of a model; None where they are silent."""

    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    vocabulary: int | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str = "fp32"
    blocks: tuple[str, ...] = ()


def subject_of(target: str, wish: Wish) -> Subject:
    """The Subject that ``target`` names. Raises InputError where there is none, saying what could be named."""
    chosen_dtype(wish.dtype)
    folder = Path(target)
    if not folder.is_dir() and target.count(":") == 1:
        _check_sizes(target, wish)
        return _made(target, wish)
    if folder.is_dir() or "/" in target or target.startswith((".", "~")):
        _check_sizes(target, wish)
        config = huggingface.load(folder.expanduser())
        cls = huggingface.class_of(config)
        return _hugging_face(target, wish, config, cls, lambda: huggingface.make(cls, config))
    if target.lower().startswith(("resnet", "dranet")):
        raise InputError(
            f"{target} was asked for: ResNets and DRANets are known by name to `tapestream train` alone; name "
            "module:factory, a Python function that returns (model, example_batch), the model from tapestream.models"
        )
    try:
        return _gpt(target, wish)
    except InputError as error:
        ways = "; or name a folder that holds a Hugging Face config.json, or module:factory"
        raise InputError(f"{error}{ways if 'no GPT is named' in str(error) else ''}") from error


def _check_sizes(target: str, wish: Wish) -> None:
    if wish.layers or wish.width or wish.heads or wish.vocabulary:
        raise InputError(f"{target} has its own size; leave --layers, --width, --heads and --vocabulary out")


def _gpt(target: str, wish: Wish) -> Subject:
    sequence = wish.sequence or DEFAULT_SEQUENCE
    config = make_config(
        target, wish.layers, wish.width, wish.heads,
        context=sequence if target == "gpt" else None, vocabulary=wish.vocabulary, dtype=chosen_dtype(wish.dtype),
    )  # fmt: skip
    if wish.sequence is None:
        sequence = min(sequence, config.context)

    def arguments(batch: int) -> Arguments:
        return tuple(torch.randint(config.vocabulary, (batch, sequence)) for _ in range(2)), {}

    return Subject(target, lambda: GPT(config).train(), arguments, wish.batch or 1, sequence, config, wish.blocks)


def _hugging_face(target: str, wish: Wish, config: Any, cls: type[nn.Module], make: Callable[[], nn.Module]) -> Subject:
    sequence = huggingface.sequence_of(cls, config, wish.sequence)

    def arguments(batch: int) -> Arguments:
        return (), huggingface.arguments(cls, config, batch, sequence or 0)

    return Subject(
        target, _cast(make, wish), _cast_arguments(arguments, wish), wish.batch or 1, sequence, blocks=wish.blocks
    )


def _made(target: str, wish: Wish) -> Subject:
    """``module:factory``. The factory is called here once on meta, to see what it returns."""
    factory = imported(target)

    def make() -> nn.Module:
        return _called(target, factory)[0]

    with torch.device("meta"):
        model, example = _called(target, factory)
    if example is None:
        config = getattr(model, "config", None)
        if getattr(model, "main_input_name", None) is None or config is None:
            raise InputError(
                f"{target} returned a {type(model).__name__} and nothing that it could be called with; let it return "
                "(model, example_batch), the batch a tensor, a tuple of arguments or a dict of named ones"
            )
        return _hugging_face(target, wish, config, type(model), make)
    if wish.sequence is not None:
        raise InputError(
            f"--seq {wish.sequence} was asked for, but {target} gives its own example batch; change it there"
        )
    size = _batch_size(target, example)

    def arguments(batch: int) -> Arguments:
        _, own = _called(target, factory)
        sized = pytree.tree_map_only(torch.Tensor, lambda t: _of_batch(t, size, batch), own)
        if isinstance(sized, dict):
            return (), sized
        return (tuple(sized) if isinstance(sized, (tuple, list)) else (sized,)), {}

    return Subject(
        target,
        _cast(make, wish),
        _cast_arguments(arguments, wish),
        wish.batch or size,
        _tokens(example),
        blocks=wish.blocks,
    )


def imported(target: str) -> Callable[[], Any]:
    """The function that ``module:function`` names. Raises InputError where there is none."""
    name, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would; an installed command does not look there
    try:
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


def _called(target: str, factory: Callable[[], Any]) -> tuple[nn.Module, Any]:
    try:
        found = factory()
    except Exception as error:
        raise InputError(
            f"{target} raised {type(error).__name__}: {error}. It is called without arguments, to plan on the meta "
            "device, where tensors have no values"
        ) from error
    model, example = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{target} returned {type(found).__name__}; it should return an nn.Module or (model, batch)")
    return model.train(), example


def _batch_size(target: str, example: Any) -> int:
    sizes = [t.shape[0] for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not sizes:
        raise InputError(f"the example batch of {target} holds no tensor with a dimension of samples; add one")
    return int(sizes[0])


def _of_batch(tensor: torch.Tensor, size: int, batch: int) -> torch.Tensor:
    """``tensor`` with ``batch`` samples in place of ``size``, repeated as often as need be."""
    if tensor.dim() == 0 or tensor.shape[0] != size or batch == size:
        return tensor
    return tensor[torch.arange(batch, device=tensor.device) % size]


def _tokens(example: Any) -> int | None:
    """The length of a batch whose first tensor is rows of whole numbers."""
    first = next(t for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor))
    return int(first.shape[1]) if first.dim() == 2 and not first.is_floating_point() else None


def _cast(make: Callable[[], nn.Module], wish: Wish) -> Callable[[], nn.Module]:
    return lambda: make().to(chosen_dtype(wish.dtype))


def _cast_arguments(arguments: Callable[[int], Arguments], wish: Wish) -> Callable[[int], Arguments]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(chosen_dtype(wish.dtype)) if tensor.is_floating_point() else tensor

    return lambda batch: pytree.tree_map_only(torch.Tensor, cast, arguments(batch))
