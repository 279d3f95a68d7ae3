"""Writes of which no version tells: into memory that several storages show (an array's and the tensor's it came from),
into running statistics, and into leaves of which autocast remembers casts."""

import torch

from tapestream.executor.program.calls.writes import places_of_statistics, trains
from tapestream.executor.program.record.keeper import foreign
from tapestream.executor.program.record.record import External, Record


def unseen(record: Record) -> str | None:
    """Why nothing of a program that has ended may be run again: it writes into memory that another of the tensors that
    it uses shows by a storage of its own (by way of NumPy or DLPack), or into statistics that it has normalised by."""
    why = _cast_before(record) or _bypassed(record) or _parted(record) or _uncopied(record)
    if why is not None:
        return why
    if not any(record.storage_external[storage] for storage in record.writes):
        return None
    return _shared(record) or _normalised(record)


def _cast_before(record: Record) -> str | None:
    """Autocast goes on with the cast that it remembers of a leaf which has been written into since."""
    casting = {
        number
        for number, ambient in enumerate(record.ambients)
        if ambient.cache and any(to is not None for _, to in ambient.casts)
    }
    for written, leaf in record.leaves_written if casting else ():
        storage = record.storage_of(leaf)
        if record.departed and leaf < 0:  # it may have been cast before anything was noted
            return "autocast may have been used on a leaf tensor that requires a gradient, which was then written into"
        for k in range(written):
            if record.ambient[k] in casting and leaf in record.arguments_of(k) and k not in record.writes[storage]:
                return (
                    "autocast was used on a leaf tensor that requires a gradient, which was then written into in the "
                    "same call"
                )
    return None


def _bypassed(record: Record) -> str | None:
    """A leaf was saved, and then written into through ``.data``: plain PyTorch's backward takes what is there now for
    it, and for all else what was there."""
    for written, storage in record.unseen_writes:
        shown = {~k for k, one in enumerate(record.externals) if one.storage == storage and one.requires}
        if any(record.packs[k] and shown.intersection(record.arguments_of(k)) for k in range(written)):
            return "a tensor that requires a gradient was used, and then written into through its .data"
    return None


def _parted(record: Record) -> str | None:
    """A value that gave its memory to a tensor of others has memory of its own in a replay."""
    for storage, since in record.handed_over.items():
        after = [k for k in record.writes.get(storage, ()) if k >= since]
        last = max((record.last_use[v] for v, own in enumerate(record.storage) if own == storage), default=-1)
        if after and last > after[0]:
            return "the memory of a tensor became another one's (.data = ...), was written into, and used by both"
    return None


def _uncopied(record: Record) -> str | None:
    if record.uncopied <= record.settled.storages:
        return None
    return "a tensor that requires a gradient was written into, read, and written into again, in the same call"


def _normalised(record: Record) -> str | None:
    """Plain PyTorch's backward of the first would take the statistics that the second has left."""
    evaluations = {
        number
        for number, pattern in enumerate(record.patterns.all)
        if places_of_statistics(pattern.function) is not None and trains(pattern.args, pattern.kwargs) is False
    }
    for k, call in enumerate(record.calls) if evaluations else ():
        if call in evaluations and any(record.written_since(record.storage_of(n), k + 1) for n in _outside(record, k)):
            return "running statistics were used in evaluation and then written into by training, in the same call"
    return None


def _outside(record: Record, k: int) -> list[int]:
    return [number for number in record.arguments_of(k) if number < 0]


def _shared(record: Record) -> str | None:
    arrays = [(one, *_span(one)) for one in record.externals if foreign(one.held)]
    if not arrays:
        return None
    spans = [(one, *_span(one)) for one in record.externals if one.held.layout is torch.strided]
    for one, start, end in arrays:
        for other, first, last in spans:
            written = one.storage in record.writes or other.storage in record.writes
            if written and other.storage != one.storage and first < end and start < last:
                return (
                    f"a tensor of shape {tuple(one.tensor.shape)} shares memory with one that the program writes into, "
                    "but has a storage of its own (by way of NumPy, say), so the writes cannot be detected"
                )
    return None


def _span(one: External) -> tuple[int, int]:
    storage = one.held.untyped_storage()
    start = storage.data_ptr()
    return start, start + (storage.nbytes() if start else 0)
