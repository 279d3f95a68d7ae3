"""Saving what ranks have divided among them: the first one writes, the others give what they have."""

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError, StorageError
from tapestream.frontends.module.stream import handle_around, handle_of, is_streamed
from tapestream.frontends.module.streamed import Streamed
from tapestream.frontends.module.whole import read_later
from tapestream.frontends.saving import generators
from tapestream.frontends.saving.folder import Saves
from tapestream.frontends.saving.state import state_of
from tapestream.frontends.saving.tree import pack, unpack
from tapestream.optim.shown import StateInParts
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.peers.agreement import Agreement

_FAILED = "could not save"


def check_loaded_together(ranks: Agreement | None, file: Path, parts: Iterable[str], call: str = "ts.load()") -> None:
    """Raise InputError, on every rank, where ranks that divide a model are to load other parts, or from other folders,
    which ``file`` tells apart: each has one, with the names of all others in it."""
    if ranks is not None:
        found = zlib.crc32(file.read_bytes()) if file.is_file() else None
        ranks.agree(f"began {call}", [file.parent.name, found, sorted(parts)])


def state_to_save(part: Any) -> Any:
    """`state_of`, with tensors that come when they are written where a model's blocks are divided."""
    with ExitStack() as read:
        for model in {id(handle.model): handle.model for handle in _handles(part)}.values():
            read.enter_context(read_later(model))
        return state_of(part)


def check_stepped(parts: Iterable[Any], call: str) -> None:
    """Raise GradientError where ``call`` comes while blocks of one of ``parts`` are a step ahead of the rest."""
    for part in parts:
        optimizer = handle_of(part).optimizer if isinstance(part, nn.Module) and is_streamed(part) else part
        if isinstance(optimizer, StreamedOptimizer):
            optimizer.check_stepped(call)


@contextmanager
def loading(ranks: Agreement | None) -> Iterator[None]:
    """Inside, a module's ``load_state_dict()`` tries every tensor, whatever happened to those before, and gathers all
    errors in a text. Where ``ranks`` are to blame, the first is raised as it was: the rest follows from it."""
    if ranks is None:
        yield
        return
    with ranks.noting() as errors:
        try:
            yield
        except RuntimeError:
            if not errors:
                raise
            raise errors[0] from None


def generators_to_save(ranks: Agreement | None) -> dict[str, Any]:
    """The states of random generators; with those of all ``ranks`` that save together, which begin by telling them."""
    own = generators.states()
    if ranks is None:
        return own
    first, *others = map(_heard, ranks.told("began ts.save()", _said(own)))
    return {**first, generators.OTHERS: others}


def _said(state: Mapping[str, Any]) -> list[Any]:
    tree, tensors = pack(state, "generators")
    flat = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    said = {
        name: [str(t.dtype).removeprefix("torch."), list(t.shape), base64.b64encode(t.numpy().tobytes()).decode()]
        for name, t in flat.items()
    }
    return [tree, said]


def _heard(told: list[Any]) -> dict[str, Any]:
    tree, said = told

    def tensor(name: str) -> torch.Tensor:
        dtype, shape, text = said[name]
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).view(shape)

    found: dict[str, Any] = unpack(tree, tensor)
    return found


def ranks_that_share(parts: Iterable[Any]) -> Agreement | None:
    """Those of a model whose blocks are divided, or of its optimizer, among ``parts``; None where there is none."""
    for handle in (handle for part in parts for handle in _handles(part)):
        if handle.ranks.one_plan is not None and handle.ranks.exchange is not None:
            return handle.ranks.exchange.agreement
    return None


def _handles(part: Any) -> Iterator[Streamed]:
    """Of streamed models that are ``part``, or in it, or have it as a block or as their optimizer."""
    whole = part.model if isinstance(part, StreamedOptimizer) else part
    for module in whole.modules() if isinstance(whole, nn.Module) else ():
        handle = handle_around(module)
        if handle is not None:
            yield handle


def saved_together(
    ranks: Agreement, tensors: Mapping[str, Mapping[str, torch.Tensor]], saves: Saves, write: Callable[[], Path],
    call: str = "ts.save()",
) -> Path:  # fmt: skip
    """What ``write()`` gives on the first rank, which reads all ``tensors`` in turn; the others read those that are
    divided, with it. Raises InputError, on every rank, where they save other things, or one does not see the folder of
    ``saves``; where the first rank cannot save it raises what `write` does, and the others StorageError, which says
    that. ``call``: what users have called."""
    divided = [(name, t) for found in tensors.values() for name, t in found.items() if isinstance(t, StateInParts)]
    ranks.agree(f"came to what {call} writes", [[name, str(t.dtype), list(t.shape)] for name, t in divided])
    _check_seen(ranks, saves, call)
    path = None
    if ranks.rank:
        _give(tensor for _, tensor in divided)
    else:
        try:
            path = write()
        except Exception as error:
            with suppress(InputError):
                ranks.told(f"{_FAILED} ({error})", None)
            raise
    with _saying_why():
        return Path(ranks.told(f"ended {call}", None if path is None else str(path))[0])


def _check_seen(ranks: Agreement, saves: Saves, call: str) -> None:
    """Raise InputError, on every rank, where one does not see the folder of ``saves`` that the first one writes to, and
    StorageError where the first one cannot write there."""
    with ExitStack() as stack:
        name = refused = None
        if ranks.rank == 0:
            try:
                name = stack.enter_context(saves.beside(0)).name
            except StorageError as error:
                refused = str(error)
        name, refused = ranks.told(f"came to the folder of {call}", [name, refused])[0]
        if refused is not None:
            raise StorageError(refused if ranks.rank == 0 else f"no rank has saved: rank 0 {_FAILED} ({refused})")
        seen = ranks.told(f"looked into the folder of {call}", [(saves.path / name).is_dir(), str(saves.path)])
    blind = [rank for rank, (found, _) in enumerate(seen) if not found]
    if blind:
        raise InputError(
            f"{call} writes to {seen[0][1]} on rank 0, and rank {blind[0]} does not see that folder as "
            f"{seen[blind[0]][1]}: nothing was written; give one folder that all ranks see, on a disk that they share"
        )


def _give(tensors: Iterable[StateInParts]) -> None:
    with _saying_why():
        for tensor in tensors:
            if tensor.pieces is not None:
                tensor.pieces()


@contextmanager
def _saying_why() -> Iterator[None]:
    """Where others do not come because the first rank could not save, that is what is raised."""
    try:
        yield
    except InputError as error:
        if _FAILED not in str(error):
            raise
        raise StorageError(f"no rank has saved: {error}") from None
