"""What belongs to a block."""

from torch import nn

from tapestream.errors import InputError
from tapestream.runner.stage import Traits
from tapestream.runner.state import State, storages


def shows(out: State, block: nn.Module) -> bool:
    """Whether what a block returns lies in the memory of one of its parameters."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    return not own.isdisjoint(storages(out.tensors))


def check_own(position: int, block: nn.Module, traits: Traits) -> None:
    """Raise InputError where a gradient belongs to no parameter of the block."""
    own = {id(p) for p in block.parameters()}
    strangers = [leaf for leaf in traits.leaves if id(leaf) not in own]
    if strangers:
        raise InputError(
            f"block {position} ({type(block).__name__}) uses a tensor of shape {tuple(strangers[0].shape)} that takes "
            "a gradient and is not one of its parameters; make it a parameter of the block, or detach() it"
        )
