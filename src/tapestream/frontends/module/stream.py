"""`stream`: an ordinary model whose parameters, gradients, optimizer state and tape stay within a budget."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from tapestream.accelerator.device import default_device, indexed
from tapestream.costs import Budget, Machine
from tapestream.errors import InputError
from tapestream.frontends.given import check_kinds, check_knobs, named_device
from tapestream.frontends.loss import Chunks, check_chunks
from tapestream.frontends.module.blocks import BlockNames, find_blocks
from tapestream.frontends.module.calls.later import calling
from tapestream.frontends.module.calls.longest import Longest
from tapestream.frontends.module.homes.home import Home, tiers_for
from tapestream.frontends.module.homes.tables import find_tables
from tapestream.frontends.module.homes.weights import Source
from tapestream.frontends.module.homes.wide import wide_modules
from tapestream.frontends.module.lazy_logits import compute_lazily, find_head, is_lazy
from tapestream.frontends.module.streamed import Site, Streamed
from tapestream.frontends.module.swap import Swaps, swap_back
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import HomeTiers
from tapestream.peers.peers import Peers
from tapestream.planning.plan import Plan
from tapestream.runner.passable import check_modules

_HANDLE = "_tapestream_handle"
_SITE = "_tapestream_site"
_WHOLE = "_tapestream_whole"


def stream(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    budget: Budget | str | int | None = None,
    home: str | Home = "auto",
    folder: str | os.PathLike[str] | None = None,
    planner: str = "auto",
    blocks: BlockNames | None = None,
    plan: Plan | None = None,
    verify: bool = False,
    machine: Machine | None = None,
    engine: str = "auto",
    weights: Source | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    loss_chunks: Chunks | None = None,
    head: str | None = None,
    longest: Any = None,
    tables: BlockNames | None = None,
    peers: Peers | Literal["auto"] | None = None,
    between: Literal["keep", "recompute"] = "keep",
    **knobs: Any,
) -> nn.Module:
    """Make ``model`` train within ``budget`` bytes on ``device``, and return the same object. The classes of its
    modules (underneath), its ``state_dict()`` keys and its Parameter objects stay the same.

    ``budget``: bytes on the device for parameters, gradients, optimizer state, tape and what runs outside the blocks
    (None: what is free now, less 5%). ``Budget(device=, host=, disk=)`` limits each tier. ``home``: where blocks live
    that do not fit: ``"host"`` (GPU only), ``"disk"`` (needs ``folder``), ``"device"``, ``"auto"``, or a `Home` with
    one of these for each kind. ``blocks``: the modules to stream, or their classes or names (None: the repeated
    children of the largest ModuleLists and Sequentials, and embeddings, heads and the like of at least 1 MiB and a
    quarter of a block's bytes). ``plan`` fixes the plan. ``verify`` runs every block twice the first time. ``machine``
    replaces measured speeds. ``engine``: of copies. ``weights``: one or several safetensors files, or a folder as
    ``save_pretrained`` writes it. What is on the ``meta`` device is made real from these one block at a time, or else
    by the model's ``initialize()``, ``_init_weights()`` or ``reset_parameters()`` (both with a warning). Names and
    dtypes are the model's; Hugging Face ones take all that ``from_pretrained`` reads. ``loss_chunks``: chunks of rows
    in which the model's cross entropy is computed (None: one, with all logits), by `linear_cross_entropy`, which says
    what "auto" is. ``head``: the layer that makes the logits, as in ``named_modules()`` (None:
    ``model.get_output_embeddings()``). With gradients on, returned logits are made when something else reads them;
    after ``optimizer.step()`` that raises GradientError. ``tables``: embeddings of which few rows are read (frozen, or
    ``sparse=True``); they stay in RAM or on the disk. ``longest``: the longest batch that will come, as `plan` takes
    one. ``peers``: the ranks that train it together (`Peers`; "auto": all, where there are several); the first one's
    weights are all's. ``between="recompute"``: the model's own code between blocks runs again with them; the bytes of
    that are estimated (docs/limits.md). Plans are made at the first call, that for ``longest`` before. Raises
    InputError for what cannot be used, StorageError where home cannot hold the blocks, BudgetError at a call that no
    plan fits, which changes nothing.
    """
    _check_model(model, between, loss_chunks)
    check_knobs("stream", stream, planner, knobs)
    check_kinds(engine, machine, plan, verify=verify)
    where, found, peers = _checked_device(device), _checked_blocks(model, blocks), _checked_peers(peers)
    linear, tiers = _head(model, head, loss_chunks, found), tiers_for(home, folder=folder, device=where, engine=engine)
    looked_up = _tables(model, found, tables, where, folder, peers)
    wide = [] if blocks is not None or _stays(tiers, peers) else wide_modules(model, found, looked_up)
    handle = Streamed(
        model, found, wide, device=where, budget=Budget.of(budget), home=tiers, folder=folder, planner=planner,
        knobs=knobs, plan=plan, verify=verify, machine=machine, engine=engine, weights=weights, progress=progress,
        longest=Longest(longest), tables=looked_up, peers=peers, recomputes_work=between == "recompute")  # fmt: skip
    _swap(handle, linear, loss_chunks)
    return model


def unstream(model: nn.Module) -> nn.Module:
    """Undo `stream`. Classes are as before, parameters and gradients get memory of their own, and files are removed.

    Needs room for the whole model in RAM.
    """
    handle = handle_of(model)
    handle._live.left = handle.store.home is not Tier.DEVICE
    handle.close()
    handle.ranks.outside.end()
    for block in handle.blocks:
        swap_back(block)
        object.__delattr__(block, _SITE)
    if handle.head is not None:
        swap_back(handle.head)
    for part in (*handle.parts, *handle.homes.tables.modules):
        swap_back(part)
        object.__delattr__(part, _WHOLE)
    swap_back(model)
    object.__delattr__(model, _HANDLE)
    return model


def handle_of(model: nn.Module) -> Streamed:
    """The handle behind a streamed model. Raises InputError for any other model."""
    handle = getattr(model, _HANDLE, None)
    if not isinstance(handle, Streamed):
        if not isinstance(model, nn.Module):
            raise InputError(f"a streamed model is needed, found a {type(model).__name__}; give the model itself")
        if hasattr(type(model), "plan"):
            raise InputError(f"this {type(model).__name__} is no streamed model; print its .plan to see what it does")
        raise InputError(
            f"this {type(model).__name__} is not streamed; call tapestream.stream(model, budget=...) first"
        )
    return handle


def handle_around(module: nn.Module) -> Streamed | None:
    """The handle of a streamed model, or of that which a block belongs to."""
    site = vars(module).get(_SITE)
    found = vars(module).get(_HANDLE)
    return site.handle if isinstance(site, Site) else found if isinstance(found, Streamed) else None


def is_streamed(model: nn.Module) -> bool:
    """Whether `stream` was called on this model."""
    return isinstance(getattr(model, _HANDLE, None), Streamed)


def _swap(handle: Streamed, linear: nn.Linear | None, chunks: Chunks | None) -> None:
    if linear is not None and chunks is not None:
        compute_lazily(linear, chunks, calling(handle, linear))
        handle.head = linear
    swaps = Swaps(handle.device, handle.ranks.ignored, together=handle.ranks.exchange is not None)
    for position, block in enumerate(handle.blocks):
        object.__setattr__(block, _SITE, Site(handle, position))
        swaps.swap(block, _call_block)
    for part in handle.parts:
        object.__setattr__(part, _WHOLE, handle)
        swaps.swap(part, _call_part)
    for table in handle.homes.tables.modules:
        object.__setattr__(table, _WHOLE, handle)
        swaps.swap(table, _call_table)
    object.__setattr__(handle.model, _HANDLE, handle)
    swaps.swap(handle.model, _call_model)


def _call_model(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return handle_of(self).call_model(self, original, args, kwargs)


def _call_part(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handle: Streamed = getattr(self, _WHOLE)
    return handle.call_model(self, original, args, kwargs)


def _call_table(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handle: Streamed = getattr(self, _WHOLE)
    assert isinstance(self, nn.Embedding)
    return handle.homes.tables.call(self, original, args, kwargs)


def _call_block(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    site: Site = getattr(self, _SITE)
    if isinstance(self, nn.Linear) and self is site.handle.head and is_lazy(self, args, kwargs):
        return original(*args, **kwargs)  # what reads the logits is a call of this block
    use = site.handle.homes.tables.use
    if use is not None:
        with use.left():
            return site.handle.call_block(site.position, original, args, kwargs)
    return site.handle.call_block(site.position, original, args, kwargs)


def _stays(home: HomeTiers, peers: Peers | None) -> bool:
    """Whether all of the model stays on the device, whole."""
    return home[Kind.PARAMETERS] is Tier.DEVICE and not (peers is not None and peers.shard)


def _tables(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    names: BlockNames | None,
    device: torch.device,
    folder: str | os.PathLike[str] | None,
    peers: Peers | None,
) -> list[nn.Embedding]:
    found = find_tables(model, blocks, names, device, folder)
    if peers is not None and any(table.weight.requires_grad for table in found):
        raise InputError(
            "tables= that are trained were asked for with peers=: their gradients are rows, which are not summed over "
            "ranks; leave tables= out, or freeze them"
        )
    return found


def _head(model: nn.Module, name: str | None, chunks: Chunks | None, blocks: Sequence[nn.Module]) -> nn.Linear | None:
    if chunks is None:
        if name is not None:
            raise InputError(f"head={name!r} is used by loss_chunks alone; add loss_chunks='auto', or leave head out")
        return None
    check_chunks("loss_chunks", chunks)
    return find_head(model, name, blocks)


def _check_model(model: object, between: str, loss_chunks: Chunks | None) -> None:
    if between not in ("keep", "recompute"):
        raise InputError(f"between={between!r} was asked for; it is 'keep' or 'recompute'")
    if between == "recompute" and loss_chunks is not None:
        raise InputError("between='recompute' and loss_chunks= were asked for, which do not go together; leave one out")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"stream takes a torch.nn.Module, found {what}; ts.Program takes functions")
    if is_streamed(model):
        raise InputError(f"this {type(model).__name__} is streamed already; call tapestream.unstream(model) first")


def _checked_peers(peers: object) -> Peers | None:
    if peers == "auto":
        distributed = torch.distributed
        there = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        return Peers() if there else None
    if peers is not None and not isinstance(peers, Peers):
        raise InputError(
            f"peers={peers!r} was asked for; it is ts.Peers(), 'auto', or None for a model of this process alone"
        )
    return peers


def _checked_blocks(model: nn.Module, blocks: BlockNames | None) -> list[nn.Module]:
    check_modules(f"this {type(model).__name__}", list(model.modules()))
    return find_blocks(model, blocks)


def _checked_device(asked: torch.device | str | None) -> torch.device:
    return named_device(asked) or indexed(default_device())
