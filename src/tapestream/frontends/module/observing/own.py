"""What belongs to a block."""

from collections.abc import Sequence

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.runner.stage import Traits
from tapestream.runner.state import State, storages


def shows(out: State, block: nn.Module) -> bool:
    """Whether what a block returns lies in the memory of one of its parameters."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    return not own.isdisjoint(storages(out.tensors))


def others_of(position: int, blocks: Sequence[nn.Module], traits: Traits) -> tuple[torch.Tensor, ...]:
    """The tensors that get a gradient from a block and belong to none: these stay on the device.

    Raises InputError for a parameter of another block, which may be elsewhere; and for one that is used more than once,
    whose gradients plain PyTorch adds up one by one.
    """
    block = blocks[position]
    own = {id(p) for p in block.parameters()}
    strangers = [leaf for leaf in traits.leaves if id(leaf) not in own]
    theirs = {id(p) for one in blocks for p in one.parameters()} if strangers else set()
    for leaf in strangers:
        if id(leaf) in theirs or id(leaf) in traits.repeated:
            why = "is a parameter of another block" if id(leaf) in theirs else "uses it more than once"
            raise InputError(
                f"block {position} ({type(block).__name__}) uses a tensor of shape {tuple(leaf.shape)} that takes a "
                f"gradient and is not one of its parameters, and {why}; make it a parameter of the block, or detach() "
                "it"
            )
    return tuple(strangers)
