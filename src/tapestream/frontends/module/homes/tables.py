"""`Tables`: embeddings that stay off the device; the few rows that a call reads are looked up where the table lies."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError
from tapestream.frontends.module.blocks import BlockNames, named_modules
from tapestream.frontends.module.homes.adopt import check_movable, check_own_bytes
from tapestream.frontends.module.homes.wide import least_wide_nbytes
from tapestream.frontends.module.swap import class_of
from tapestream.ir.actions import Tier
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region


def find_tables(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    names: BlockNames | None,
    device: torch.device | None = None,
    folder: Any = None,
) -> list[nn.Embedding]:
    """The modules that ``names`` names as `find_blocks` takes them, None for none: frozen ones, and ones made with
    ``sparse=True``, whose gradients are sparse tensors of the CPU, where SGD, Adagrad and SparseAdam step them by rows.

    Raises InputError for a module that is no ``nn.Embedding``, lies inside a block, shares its weight with another
    module, or makes dense gradients, which are as large as the table; and where ``device`` (None: not asked) is RAM and
    no ``folder`` on a disk is given.
    """
    found = [] if names is None else named_modules(model, names, "tables")
    inside = {id(module) for block in blocks for module in block.modules()}
    tables: list[nn.Embedding] = []
    for module in found:
        kind = type(module).__name__
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise InputError(f"tables= names a {kind}; only the rows of an nn.Embedding are looked up: leave it out")
        if id(module) in inside:
            raise InputError(f"tables= names a {kind} inside a block; name other blocks with blocks=, or leave it out")
        check_movable(f"the weight of a {kind} that tables= names", module.weight)
        check_own_bytes(model, [module])
        users = [one for one in model.modules() if any(p is module.weight for p in one._parameters.values())]
        if len(users) > 1:
            other = next(type(one).__name__ for one in users if one is not module)
            raise InputError(
                f"tables= names a {kind} whose weight a {other} uses, too (tied weights), and that reads all of it: "
                "leave it out"
            )
        if module.weight.requires_grad and not module.sparse:
            raise InputError(
                f"tables= names a {kind} that is trained with dense gradients, which are as large as the table: make "
                "it with sparse=True, freeze it (requires_grad_(False)), or leave it out"
            )
        tables.append(module)
    if tables and device is not None and folder is None and not is_accelerator(device):
        raise InputError("tables= keeps tables off the device, and here that is RAM: give folder=, a folder on a disk")
    return tables


def may_be_table(model: nn.Module, blocks: Sequence[nn.Module], name: str) -> bool:
    """Whether it is worth a try, and `find_tables` would take the module of that name."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Embedding) or module.weight.nbytes < least_wide_nbytes(blocks):
        return False
    try:
        return bool(find_tables(model, blocks, [module]))
    except InputError:
        return False


class Tables:
    """The bytes of some embeddings, in RAM or on the disk, and calls of them.

    A call is the module's own, on the CPU, with the indices brought there and the rows brought to the device; so is its
    backward. Sparse gradients are tensors of the CPU, and a torch optimizer steps these parameters there, on rows.
    """

    def __init__(self, modules: Sequence[nn.Embedding], pool: Pool, device: torch.device) -> None:
        self.modules, self._pool, self.device = modules, pool, device
        self._regions: list[Region] = []
        self._rows: dict[int, int] = {}  # bytes of what the last call looked up, by the id of a table that is trained
        self._looking = False  # up rows, in a call

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Of all of them."""
        return tuple(p for module in self.modules for p in module.parameters())

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the device that the sparse gradients of one backward take: 0 on a GPU."""
        return 0 if is_accelerator(self.device) else sum(self._rows.values())

    def check_use(self, leaves: Iterable[Any]) -> None:
        """Raise InputError where a function that is no call of a table, and has failed, was given one: on the device,
        say, it would have worked."""
        weights = {id(p): module for module in self.modules for p in module.parameters()}
        found = next((weights[id(leaf)] for leaf in leaves if id(leaf) in weights), None)
        if found is not None and not self._looking:
            raise InputError(
                f"the weight of a {class_of(found).__name__} that tables= names is used outside of its calls, by code "
                "that wants all of it on the device: leave that one out of tables="
            )

    def nbytes(self, tier: Tier) -> int:
        """Bytes that they take in ``tier``."""
        return sum(region.nbytes for region in self._regions if region.tier is tier)

    def adopt(self, module: nn.Embedding, tier: Tier) -> None:
        """Let a table lie in ``tier``. Raises BudgetError or StorageError where that has no room."""
        weight = module.weight
        region = self._pool.allocate(tier, weight.nbytes)
        self._regions.append(region)
        memory = region.file.map() if region.extent is not None else region.memory
        with torch.no_grad():
            shown = memory.view(weight.dtype).view(weight.shape)
            shown.copy_(weight.detach())
            weight.data = shown

    def tier(self, module: nn.Embedding, *, disk: bool) -> Tier:
        """Where a table is to lie: RAM below a GPU, as far as the budget goes, else the ``disk``, if there is one."""
        if not is_accelerator(self.device):
            return Tier.DISK
        room = self._pool.room_nbytes(Tier.HOST)
        return Tier.DISK if disk and room is not None and room < 2 * module.weight.nbytes else Tier.HOST

    def call(
        self, module: nn.Embedding, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of ``module``. Raises InputError where it is trained with dense gradients by now."""
        trained = module.weight.requires_grad and torch.is_grad_enabled()
        if trained and not module.sparse:
            raise InputError(
                f"a {class_of(module).__name__} that tables= names was frozen, and is trained now: its gradients would "
                "be as large as the table. Freeze it again, or call tapestream.unstream(model) and stream it without"
            )
        below = torch.device("cpu")
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(below), (args, kwargs))
        self._looking, before = True, self._looking
        try:
            rows = original(*args, **kwargs)
        finally:
            self._looking = before
        if trained:
            self._rows[id(module)] = sum(t.nbytes for t in pytree.tree_leaves(rows) if isinstance(t, torch.Tensor))
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), rows)

    def close(self) -> None:
        """Give every table memory of its own again."""
        for module in self.modules[: len(self._regions)]:
            module.weight.data = module.weight.data.clone()
        self._regions.clear()
