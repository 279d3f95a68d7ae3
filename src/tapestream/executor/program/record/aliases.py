"""Writes of which no version tells: into memory that several storages show (an array's and the tensor's it came from),
into running statistics, and into leaves of which autocast remembers casts."""

import torch

from tapestream.executor.program.calls.writes import places_of_statistics, trains
from tapestream.executor.program.record.keeper import foreign
from tapestream.executor.program.record.record import External, Record


def unseen(record: Record) -> str | None:
    """Why nothing of a program that has ended may be run again: it writes into memory that another of the tensors that
    it uses shows by a storage of its own (by way of NumPy or DLPack), or into statistics that it has normalised by."""
    if (why := _cast_before(record)) is not None:
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
        for k in range(written):
            if record.ambient[k] in casting and leaf in record.arguments_of(k) and k not in record.writes[storage]:
                return (
                    "autocast was used on a leaf tensor that requires a gradient, which was then written into in the "
                    "same call"
                )
    return None


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
