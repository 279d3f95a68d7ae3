"""`optimizer`: a torch optimizer for a streamed model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.optim.groups import as_groups
from tapestream.optim.streamed import StreamedOptimizer


def optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    groups: Sequence[dict[str, Any]] | None = None,
    update: str = "step",
    master: str | None = "auto",
    where: str = "auto",
    **options: Any,
) -> StreamedOptimizer:
    """``optimizer_class(..., **options)`` for a streamed model. Its state lives where the parameters live.

    Any optimizer that treats tensors independently will do (AdamW, SGD, Muon ...); it is tried on small tensors first.
    Counters in its groups or on itself advance once a step. ``groups``: torch's list of dicts (None: all parameters
    that require gradients, those too that do so later, with the options of the first group); parameters in none are
    not updated. ``add_param_group`` works as in torch. A model has one such optimizer. A
    new one replaces it, and the old one then refuses to be used. ``update="step"``: gradients are sent home, and
    ``step()`` updates block by block; clipping and accumulation work. ``update="backward"``: each block is updated as
    soon as its gradient has arrived, so all gradients never exist at once. ``step()`` then updates only what lies
    outside blocks, and must come before the next forward; clipping by global norm, accumulation, a second live call and
    GradScaler raise GradientError. ``master="auto"``: 16-bit parameters get fp32 masters; None updates them as they
    are. The updates equal those of the same torch implementation on the plain model, bit for bit.

    ``where="host"``: blocks that live in RAM or on disk below a GPU are updated in RAM, beside the GPU's work: neither
    masters nor state pass the link, only gradients down and weights up. The updates equal those of the same torch
    optimizer on copies of parameters and gradients on the CPU, bit for bit, with torch's fused kernel where it has one
    there (``fused=False`` leaves that out). With ``update="step"`` they go on under the next forward, if nothing is at
    home on disk: whoever looks at a parameter, its gradient or its state waits for its update. ``"mixed"``: the
    first plan says which blocks are updated in RAM and which on the device, so that a step is as fast as may be; each
    block has the bits of torch's optimizer there, and is updated there in all other calls, and in a run that goes on
    from a save. ``"device"``: on the device; ``"auto"``: too, as the CPU's kernels were not measured to give the bits
    of the GPU's. What lies outside the blocks is updated on the device.

    Raises InputError for sparse gradients (``nn.Embedding(..., sparse=True)``) and an optimizer that takes none, for
    unknown options, for an optimizer that looks across tensors or cannot be tried, and for other
    parameters than those of an optimizer that was never stepped (use ``groups``); StorageError if the disk cannot hold
    its state.
    """
    handle = handle_of(model)
    if where == "mixed" and handle.ranks.exchange is not None:
        raise InputError(
            "where='mixed' was asked for, but several ranks train this model, and each might update other blocks in "
            "RAM: their weights would not stay the same; use where='host' or where='device'"
        )
    chosen = as_groups(groups if groups is not None else [p for p in model.parameters() if p.requires_grad])
    _check_sparse(model, optimizer_class, chosen, options)
    made = StreamedOptimizer(
        handle,
        optimizer_class,
        chosen,
        update=update,
        master=master,
        options=options,
        takes_all=groups is None,
        where=where,
    )
    handle.homes.check_room_for_updates(handle.budget, gradients=update == "step")
    return made


def _check_sparse(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    """Raise InputError where a step would fail on a sparse gradient, when blocks have been updated already."""
    among = {id(p): group for group in groups for p in group["params"]}
    for name, module in model.named_modules():
        if not getattr(module, "sparse", False) or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = module.weight
        if not weight.requires_grad or id(weight) not in among:
            continue
        group = {key: value for key, value in among[id(weight)].items() if key != "params"}
        if not _takes_sparse(optimizer_class, {**options, **group}):
            raise InputError(
                f"{name} makes sparse gradients, which {optimizer_class.__name__} with these options does not take: "
                "give groups= without its weight, and step that with torch.optim.SparseAdam, SGD or Adagrad beside it"
            )


def _takes_sparse(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Tried on a small tensor. What fails otherwise is found, and named, elsewhere."""
    place = torch.device("cpu")
    with place, torch.enable_grad():
        small = nn.Parameter(torch.ones(4, 2, device=place))
        row, values = torch.ones(1, 1, dtype=torch.long, device=place), torch.ones(1, 2, device=place)
        small.grad = torch.sparse_coo_tensor(row, values, (4, 2), device=place, check_invariants=False)
        try:
            optimizer_class([small], **options).step()
        except RuntimeError:
            return False
        except Exception:
            return True
    return True
