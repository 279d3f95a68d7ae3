"""What a command is about: one of our GPTs, a Hugging Face configuration, or what a Python function returns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.cli import huggingface
from tapestream.cli.chosen import chosen_dtype, config_of
from tapestream.cli.targets import (
    DEFAULT_SEQUENCE,
    TargetOptions,
    check_target,
    gpt_of,
    imported,
    is_folder,
    is_function,
)
from tapestream.errors import InputError
from tapestream.models import GPT, GPTConfig
from tapestream.models.shapes import GPT_SIZES

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: by position, by name."""


_LAYERS = 4
"""As many are outlined of a GPT: the first, the last, and others that are all alike."""


@dataclass(frozen=True, slots=True)
class Shallow:
    """A model that is outlined in place of a deeper one. ``layer``: positions of the blocks of a layer that comes
    ``left_out`` times more in that."""

    make: Callable[[], nn.Module]
    layer: range
    left_out: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be made and how it is called; both on PyTorch's default device of the moment.

    ``make``: the model, in train mode. ``arguments``: of a call with so many samples. ``batch``: samples of a step.
    ``sequence``: tokens per sample, None where samples are no sequences of tokens. ``config``: of our own GPTs.
    ``blocks``: names of its blocks or their classes; empty where they are to be found. ``shallow``: what is outlined
    in its place, None where it is itself.
    """

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[int], Arguments]
    batch: int
    sequence: int | None
    config: GPTConfig | None = None
    blocks: tuple[str, ...] = ()
    shallow: Shallow | None = None

    @property
    def unit(self) -> str:
        """What is counted per second."""
        return "samples" if self.sequence is None else "tokens"

    def step(self, batch: int) -> str:
        """``"4 x 1024 tokens"``, ``"4 samples"``."""
        return f"{batch} samples" if self.sequence is None else f"{batch} x {self.sequence} tokens"


def subject_of(target: str, wish: TargetOptions) -> Subject:
    """The Subject that ``target`` names. Raises InputError where there is none, saying what could be named."""
    check_target(target, wish)
    if is_function(target):
        return _made(target, wish)
    if is_folder(target):
        config = huggingface.load(Path(target).expanduser())
        cls = huggingface.class_of(config)
        return _hugging_face(target, wish, config, cls, lambda: huggingface.make(cls, config))
    return _gpt(target, wish)


def _gpt(target: str, wish: TargetOptions) -> Subject:
    config = config_of(gpt_of(target, wish), chosen_dtype(wish.dtype))
    sequence = wish.sequence or min(DEFAULT_SEQUENCE, config.context)

    def arguments(batch: int) -> Arguments:
        return tuple(torch.randint(config.vocabulary, (batch, sequence)) for _ in range(2)), {}

    published = GPT_SIZES.get(target.lower())
    longer = published is not None and sequence > published[-1]
    name = f"{target} with {sequence} positions" if longer else target
    shallow = None if wish.blocks else _shallow(config)
    return Subject(
        name, lambda: GPT(config).train(), arguments, wish.batch or 1, sequence, config, wish.blocks, shallow
    )


def _shallow(config: GPTConfig) -> Shallow | None:
    blocks = 2 if config.halves else 1
    if config.shared or config.layers <= _LAYERS:
        return None
    few = replace(config, layers=_LAYERS)
    return Shallow(lambda: GPT(few).train(), range(blocks, 2 * blocks), config.layers - _LAYERS)


def _hugging_face(
    target: str, wish: TargetOptions, config: Any, cls: type[nn.Module], make: Callable[[], nn.Module]
) -> Subject:
    sequence = huggingface.sequence_of(cls, config, wish.sequence)

    def arguments(batch: int) -> Arguments:
        return (), huggingface.arguments(cls, config, batch, sequence or 0)

    return Subject(
        target, _cast(make, wish), _cast_arguments(arguments, wish), wish.batch or 1, sequence, blocks=wish.blocks
    )


def _made(target: str, wish: TargetOptions) -> Subject:
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
                f"{target} returned a {type(model).__name__} without an example batch; return (model, example_batch), "
                "the batch a tensor, a tuple of arguments or a dict of named ones"
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
        raise InputError(f"the example batch of {target} holds no tensor with a batch dimension; add one")
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


def _cast(make: Callable[[], nn.Module], wish: TargetOptions) -> Callable[[], nn.Module]:
    return lambda: make().to(chosen_dtype(wish.dtype))


def _cast_arguments(arguments: Callable[[int], Arguments], wish: TargetOptions) -> Callable[[int], Arguments]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(chosen_dtype(wish.dtype)) if tensor.is_floating_point() else tensor

    return lambda batch: pytree.tree_map_only(torch.Tensor, cast, arguments(batch))
