"""Storages that the stretches of a program share: in states at their borders and among what they save."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy

from tapestream.costs import Profile, SharedStorage, Sharing
from tapestream.frontends.program.sizes import Numbers, Sizes
from tapestream.frontends.program.stage_bytes import StageBytes


def shared_by(sizes: Sizes, cuts: Sequence[int]) -> tuple[SharedStorage, ...]:
    """Those of the stretches between ``cuts``; storages that the same values share are one.

    Restart checkpoints hold the program's own storages, and what is saved of a state is a part of it. What is written
    into counts from its last write on: before that, each restart checkpoint has a copy.
    """
    own = (numpy.asarray(sizes.record.storage_external) == 0) & (sizes.nbytes > 0) & (sizes.start > 0)
    borders = numpy.asarray(cuts)
    since = numpy.maximum(sizes.start, sizes.written + 1)
    first, last = numpy.searchsorted(borders, since), numpy.searchsorted(borders, sizes.stop, side="right") - 1
    storages, stages = _tapes(sizes, borders, first, last)
    holders = numpy.maximum(0, last - first + 1)
    numpy.add.at(holders, storages, 1)
    chosen = own & (holders > 1) & (first <= last)
    tapes: dict[int, list[int]] = {}
    for storage, stage in zip(storages.tolist(), stages.tolist(), strict=True):
        if chosen[storage]:
            tapes.setdefault(storage, []).append(stage)
    alike: dict[tuple[int, int, tuple[int, ...]], int] = {}
    (numbers,) = numpy.nonzero(chosen)
    for storage, a, b, nbytes in zip(
        *(one.tolist() for one in (numbers, first[numbers], last[numbers], sizes.nbytes[numbers])), strict=True
    ):
        values = a, b, tuple(tapes.get(storage, ()))
        alike[values] = alike.get(values, 0) + nbytes
    return tuple(SharedStorage(a, b, nbytes, saving) for (a, b, saving), nbytes in alike.items())


def _tapes(sizes: Sizes, borders: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
    """Storages saved by stretches that states have, too, and these stretches, each pair once."""
    storages, operations = sizes.saves()
    stages = numpy.searchsorted(borders, operations, side="right") - 1
    there = (stages >= first[storages] - 1) & (stages <= last[storages]) & (operations > sizes.written[storages])
    pairs = numpy.unique(numpy.stack((storages[there], stages[there])), axis=1)
    return pairs[0], pairs[1]


def sharing(apart: Profile, storages: Sequence[SharedStorage], bytes_of: Sequence[StageBytes]) -> Profile:
    """The profile ``apart``, which counts each value by itself, with what several values share: saved tensors are then
    all that a stretch saves, and transient bytes are those beside the union of what is there."""
    n = len(apart)
    passing, saved = [0] * (n + 1), [0] * n  # by stage: in both states around it; saved, and in one of these
    for shared in storages:
        passing[shared.first] += shared.nbytes
        passing[shared.last] -= shared.nbytes
        for stage in shared.tapes:
            saved[stage] += shared.nbytes
    stages = []
    for k, (cost, one, both) in enumerate(zip(apart.stages, bytes_of, accumulate(passing), strict=False)):
        states = one.alive - both
        around = cost.cotangent_bytes + apart.cotangent_nbytes(k) + cost.gradient_nbytes
        stages.append(
            replace(
                cost,
                saved_nbytes=one.tape,
                reads_input=False,
                reads_output=False,
                forward_extra_nbytes=max(0, one.forward - states),
                record_extra_nbytes=max(0, one.record - states - one.tape + saved[k]),
                backward_extra_nbytes=max(-one.tape - cost.cotangent_bytes, one.reversing - one.tape - around),
            )
        )
    return replace(apart, stages=tuple(stages), shared=Sharing(tuple(storages), tuple(apart.stages)))
