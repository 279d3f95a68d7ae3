"""`Tables`: embeddings that stay off the device; the few rows that a call reads are looked up where the table lies."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError
from tapestream.frontends.module.blocks import BlockNames, named_modules
from tapestream.frontends.module.homes.adopt import check_movable, check_own_bytes
from tapestream.frontends.module.homes.between import BetweenBlocks, is_about_itself
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
    members = {id(module) for module in model.modules()}
    tables: list[nn.Embedding] = []
    for module in found:
        what = f"tables= names {_an(type(module))}"
        if id(module) not in members:
            raise InputError(f"{what} that is not part of the model: leave it out")
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise InputError(f"{what}; only the rows of an nn.Embedding are looked up: leave it out")
        if id(module) in inside:
            raise InputError(f"{what} inside a block; name other blocks with blocks=, or leave it out")
        if "weight" not in module._parameters:
            raise InputError(f"{what} whose weight is made anew in each call (parametrized, say): leave it out")
        _check_weight(model, module, what)
        tables.append(module)
    if tables and device is not None and folder is None and not is_accelerator(device):
        raise InputError("tables= keeps tables off the device, and here that is RAM: give folder=, a folder on a disk")
    return tables


def _check_weight(model: nn.Module, module: nn.Embedding, what: str) -> None:
    check_movable(f"{what}, whose weight", module.weight)
    check_own_bytes(model, [module])
    users = [one for one in model.modules() if any(p is module.weight for p in one._parameters.values())]
    if len(users) > 1:
        other = next(one for one in users if one is not module)
        raise InputError(
            f"{what} whose weight {_an(type(other))} uses, too (tied weights), and that reads all of it: leave it out"
        )
    if module.weight.requires_grad and not module.sparse:
        raise InputError(
            f"{what} that is trained with dense gradients, which are as large as the table: make it with sparse=True, "
            "freeze it (requires_grad_(False)), or leave it out"
        )


def may_be_table(model: nn.Module, blocks: Sequence[nn.Module], name: str) -> bool:
    """Whether it is worth a try, and `find_tables` would take the module of that name."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Embedding) or module.weight.nbytes < least_wide_nbytes(blocks):
        return False
    try:
        return bool(find_tables(model, blocks, [module]))
    except InputError:
        return False


class WeightUse(BetweenBlocks):
    """Refuses functions between blocks that make tensors of a table's weight and are no calls of it: they want all of
    it on the device, and their gradients are as large. ``weights``: by ``id`` the table of each."""

    def __init__(self, weights: Mapping[int, nn.Embedding]) -> None:
        super().__init__()
        self._weights = weights
        self._looking = False  # up rows, in a call

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """A call of a table runs inside."""
        self._looking, before = True, self._looking
        try:
            yield
        finally:
            self._looking = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._looking or self.asleep or torch.compiler.is_compiling() or is_about_itself(func):
            return func(*args, **kwargs)
        found = next(map(self._weights.get, filter(self._weights.__contains__, map(id, _given(args, kwargs)))), None)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:  # of another device
            if found is None:
                raise
            raise self._refusal(found) from error
        if found is not None and any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(result)):
            raise self._refusal(found)
        return result

    def _refusal(self, module: nn.Embedding) -> InputError:
        return InputError(
            f"the weight of {_an(class_of(module))} that tables= names is used outside of its calls, by code that "
            "wants all of it on the device: leave that one out of tables="
        )


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What a function was given, in lists and tuples too."""
    for one in (*args, *kwargs.values()):
        yield one
        if type(one) in (list, tuple):
            yield from one


def _an(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


class Tables:
    """The bytes of some embeddings, in RAM or on the disk, and calls of them.

    A call is the module's own, on the CPU, with the indices brought there and the rows brought to the device; so is its
    backward. Sparse gradients are tensors of the CPU, and a torch optimizer steps these parameters there, on rows.
    """

    def __init__(self, modules: Sequence[nn.Embedding], pool: Pool, device: torch.device) -> None:
        self.modules, self._pool, self.device = modules, pool, device
        self._regions: list[Region] = []
        self.use: WeightUse | None = None  # while a call of the model is under way
        self._noting, self._made_nbytes = False, 0

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Of all of them."""
        return tuple(p for module in self.modules for p in module.parameters())

    @property
    def below_is_disk(self) -> bool:
        """Whether RAM is the device."""
        return not is_accelerator(self.device)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the device that the sparse gradients of a backward take, as in the last observed call: 0 on a
        GPU."""
        return self._made_nbytes if self.below_is_disk else 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A call of the model runs inside: what uses a weight between blocks, and is no call of a table, is refused."""
        if not self.modules or self.use is not None:
            yield
            return
        self.use = WeightUse({id(p): module for module in self.modules for p in module.parameters()})
        try:
            with self.use:
                yield
        finally:
            self.use = None

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """The same, and what its lookups make is noted."""
        self._noting, self._made_nbytes = True, 0
        try:
            with self.watched():
                yield
        finally:
            self._noting = False

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
                f"{_an(class_of(module))} that tables= names was frozen, and is trained now: its gradients would "
                "be as large as the table. Freeze it again, or call tapestream.unstream(model) and stream it without"
            )
        below = torch.device("cpu")
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(below), (args, kwargs))
        with contextlib.nullcontext() if self.use is None else self.use.looking():
            rows = original(*args, **kwargs)
        if trained and self._noting:  # values and indices
            given = (*args, *kwargs.values(), *pytree.tree_leaves(rows))
            self._made_nbytes += sum(t.numel() * max(8, t.itemsize) if not t.is_floating_point() else t.nbytes
                                     for t in given if isinstance(t, torch.Tensor))  # fmt: skip
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), rows)

    def close(self) -> None:
        """Give every table memory of its own again."""
        for module in self.modules[: len(self._regions)]:
            module.weight.data = module.weight.data.clone()
        self._regions.clear()
