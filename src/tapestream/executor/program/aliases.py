"""Memory that several storages show: an array's and the tensor's it came from. No version tells of writes there."""

import torch

from tapestream.executor.program.keeper import foreign
from tapestream.executor.program.record import External, Record


def unseen_sharing(record: Record) -> str | None:
    """Why nothing of a program that has ended may be run again: it writes into memory that another of the tensors that
    it uses shows by a storage of its own (by way of NumPy or DLPack)."""
    if not any(record.storage_external[storage] for storage in record.writes):
        return None
    spans = [(one, *_span(one)) for one in record.externals if one.held.layout is torch.strided]
    for one, start, end in spans:
        if not foreign(one.held):
            continue
        for other, first, last in spans:
            written = one.storage in record.writes or other.storage in record.writes
            if written and other.storage != one.storage and first < end and start < last:
                return (
                    f"a tensor of shape {tuple(one.tensor.shape)} shows the memory of another that the program writes "
                    "into, by a storage of its own (by way of NumPy, say), so that no version tells of the writes"
                )
    return None


def _span(one: External) -> tuple[int, int]:
    storage = one.held.untyped_storage()
    start = storage.data_ptr()
    return start, start + (storage.nbytes() if start else 0)
