"""Saving what ranks have divided among them: the first one writes, the others give what they have."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of, is_streamed
from tapestream.frontends.module.whole import read_later
from tapestream.frontends.saving.state import state_of
from tapestream.optim.shown import StateInParts
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.peers.agreement import Agreement


def state_to_save(part: Any) -> Any:
    """`state_of`, of a model whose blocks are divided with tensors that come when they are written."""
    if isinstance(part, nn.Module) and is_streamed(part):
        with read_later(part):
            return state_of(part)
    return state_of(part)


def ranks_that_share(parts: Iterable[Any]) -> Agreement | None:
    """Those of a model whose blocks are divided, or of its optimizer, among ``parts``; None where there is none."""
    for part in parts:
        model = part.model if isinstance(part, StreamedOptimizer) else part
        ranks = handle_of(model).ranks if isinstance(model, nn.Module) and is_streamed(model) else None
        if ranks is not None and ranks.one_plan is not None and ranks.exchange is not None:
            return ranks.exchange.agreement
    return None


def saved_together(
    ranks: Agreement, tensors: Mapping[str, Mapping[str, torch.Tensor]], write: Callable[[], Path]
) -> Path:
    """What ``write()`` gives on the first rank, which reads all ``tensors`` in turn; the others read those that are
    divided, with it. Raises InputError, on every rank, where they save other things; where the first rank cannot save
    it raises what `write` does, and the others InputError, which says that."""
    divided = [(name, t) for found in tensors.values() for name, t in found.items() if isinstance(t, StateInParts)]
    ranks.agree("began ts.save()", [[name, str(t.dtype), list(t.shape)] for name, t in divided])
    path = None
    if ranks.rank:
        for _, tensor in divided:
            if tensor.pieces is not None:
                tensor.pieces()
    else:
        try:
            path = write()
        except Exception as error:
            with suppress(InputError):
                ranks.told(f"could not save ({error})", None)
            raise
    return Path(ranks.told("ended ts.save()", None if path is None else str(path))[0])
