"""When blocks that are divided among ranks are on the device: whole while stages run, as shards for updates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tapestream.costs import Profile
from tapestream.ir import Kind, Tier, Value
from tapestream.passes.residency import UpdateMode
from tapestream.passes.runs import Run
from tapestream.passes.stays import Stay

DEVICE, SHARD = Tier.DEVICE, Tier.SHARD


@dataclass(frozen=True, slots=True)
class Divided:
    """``routes``: from the home of each kind to SHARD; ``runs``: of what uses each value; ``end``: the last action.
    ``update``, ``accumulate``: as in `stream_parameters`."""

    profile: Profile
    routes: Mapping[Kind, tuple[Tier, ...]]
    runs: Mapping[Value, Sequence[Run]]
    update: UpdateMode
    accumulate: bool
    end: int

    def stays(self, value: Value, resident: bool) -> Iterator[Stay]:
        """Those of one value. ``resident``: its shard never leaves the device."""
        if value.kind is Kind.GRADIENT:
            yield from self._of_gradient(value, resident)
            return
        route = self.routes[value.kind]
        if resident:
            yield self._shard(value, 0, self.end)
            route = (SHARD,)
        runs = self.runs.get(value, ())
        since: int | None = None  # where the shard that is to be updated has come
        for run, later in zip(runs, (*runs[1:], None), strict=False):
            if run.tier is SHARD:
                if not resident:
                    start = run.start if since is None else since
                    yield self._shard(value, start, run.stop, arrive=route, leave=route[::-1])
                continue
            if later is not None and later.tier is SHARD and self.update == "backward":
                since = run.start
            way = route if since is None else (SHARD,)
            yield self._whole(value, run.start, run.stop, arrive=(*way, DEVICE), free=(DEVICE,))

    def _of_gradient(self, value: Value, resident: bool) -> Iterator[Stay]:
        """Whole from the block's first backward to its last; then its sum over ranks, which users see as ``.grad``."""
        route, found = self.routes[value.kind], self.runs.get(value, ())
        backwards, updates = ([run for run in found if run.tier is tier] for tier in (DEVICE, SHARD))
        if not backwards:
            if self.accumulate and resident:
                yield self._shard(value, 0, self.end)
            return
        first, last = backwards[0].start, backwards[-1].stop
        stays = resident or self.update == "backward"
        due = updates[0].start if stays and updates else None
        yield self._whole(value, first, last, leave=(DEVICE, SHARD) if stays else (DEVICE, *route[::-1]), due=due)
        if self.update == "backward":
            yield self._shard(value, last, updates[-1].stop, free=(SHARD,))
        elif resident:
            yield self._shard(value, 0 if self.accumulate else last, self.end, free=(SHARD,) if updates else ())
        elif updates:
            yield self._shard(value, updates[0].start, updates[-1].stop, arrive=route, free=(SHARD, route[0]))
        elif self.accumulate:  # what comes of this backward is added to it, and goes home with it
            yield self._shard(value, first, last, arrive=route)

    def _whole(self, value: Value, start: int, stop: int, **ways: object) -> Stay:
        nbytes, shard = (self.profile.block_nbytes(value, tier) for tier in (DEVICE, SHARD))
        return Stay(value, nbytes, start, stop, shard=shard, **ways)  # type: ignore[arg-type]

    def _shard(self, value: Value, start: int, stop: int, **ways: object) -> Stay:
        shard = self.profile.block_nbytes(value, SHARD)
        return Stay(value, shard, start, stop, shard=shard, tier=SHARD, **ways)  # type: ignore[arg-type]
