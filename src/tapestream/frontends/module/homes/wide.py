"""Modules outside the blocks that hold many bytes themselves: token embeddings, heads, tables of positions."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.frontends.module.homes.adopt import check_movable, check_own_bytes
from tapestream.frontends.module.homes.between import BetweenBlocks

_LEAST_NBYTES = 2**20  # below, moving a module costs more than its bytes are worth
_SHARE = 4  # of the bytes of the largest block


def wide_modules(model: nn.Module, blocks: Sequence[nn.Module], but: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The modules to be streamed like ``blocks``, in the model's order.

    Those are modules without children whose own parameters take 1 MiB and a quarter of the largest block, and whose
    call is a function of them: an Embedding that makes sparse gradients or renormalises its weight stays outside, as
    does what cannot be moved, and ``but`` these.
    """
    inside = {id(m) for block in blocks for m in block.modules()}
    least = least_wide_nbytes(blocks)
    return [
        module
        for module in model.modules()
        if id(module) not in inside
        and module is not model
        and module not in but
        and not any(True for _ in module.children())
        and sum(p.nbytes for p in module.parameters()) >= least
        and not getattr(module, "sparse", False)
        and getattr(module, "max_norm", None) is None
        and _can_move(model, module)
    ]


def least_wide_nbytes(blocks: Sequence[nn.Module]) -> int:
    """Bytes from which on a module is worth moving."""
    largest = max((sum(p.nbytes for p in block.parameters()) for block in blocks), default=0)
    return max(_LEAST_NBYTES, largest // _SHARE)


def adds_once(module: nn.Module) -> bool:
    """Whether a call's backward makes one gradient of the weight, and adds nothing up inside."""
    forward = inspect.unwrap(type(module).forward)  # a head whose loss is made by chunks has another around it
    return any(forward is known.forward for known in (nn.Embedding, nn.Linear))


def reads_parameters(module: nn.Module) -> bool:
    """Whether a backward of a call may read the module's parameters: that of an embedding looks at indices alone."""
    return type(module).forward is not nn.Embedding.forward


def trains(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a call makes can require gradients."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return any(t.requires_grad for t in (*tensors, *module.parameters()))


def parameters_of(store: BlockStore, positions: Iterable[int]) -> dict[int, int]:
    """The parameter block of each parameter of the modules at ``positions``, by ``id``."""
    blocks = {block for position in positions if (block := store.uses[position]) is not None}
    return {id(p): block for block in blocks for p in store.blocks[block].parameters}


class DirectUse(BetweenBlocks):
    """Notices functions that make tensors of ``parameters`` where no streamed module is called.

    ``parameters``: by ``id``, the number of its block; ``found``: blocks whose parameters were used so.
    """

    def __init__(self, parameters: Mapping[int, int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.found: set[int] = set()

    def keeps(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of ``module`` is such a use itself: given no tensor (the shape of one, say), it has no state
        to go on from."""
        own = {self.parameters[id(p)] for p in module.parameters() if id(p) in self.parameters}
        if not own or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return False
        self.found |= own
        return True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.asleep:
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        used = {self.parameters[id(leaf)] for leaf in leaves if id(leaf) in self.parameters}
        if used and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self.found |= used
        return result


def _can_move(model: nn.Module, module: nn.Module) -> bool:
    try:
        for name, parameter in module.named_parameters():
            check_movable(f"parameter {name!r} of a {type(module).__name__}", parameter)
        check_own_bytes(model, [module])
    except InputError:
        return False
    return True
