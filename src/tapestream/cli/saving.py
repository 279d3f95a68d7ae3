"""``tapestream train --saves``: saves of a run, also when a signal asks for one, and going on from them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import tapestream as ts
from tapestream.cli.loop import Job, Report
from tapestream.errors import InputError

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Saver:
    """Saves every ``every`` steps (0: only when asked, and at the end), in ``folder``; in none if that is None."""

    def __init__(self, folder: Path | None, every: int, job: Job, parts: dict[str, Any], progress: Report) -> None:
        self._folder, self._every, self._job = folder, every, job
        self._parts, self._progress = parts, progress
        self._asked = False
        self.stopped_by: signal.Signals | None = None

    def resume(self) -> tuple[Job, int]:
        """Bring the run to where the last save was made; returns the job, which keeps the warm-up that it had even if
        more steps are wanted now, and the steps that it had taken.

        Raises InputError where the save is of another run, or there is none.
        """
        if self._folder is None:
            raise InputError("--resume was asked for without --saves; name the folder of the saves")
        saved = ts.load(self._folder)["job"]
        mine = self._identity()
        other = [name for name in mine if name != "warmup" and saved.get(name) != mine[name]]
        if other:
            name = other[0]
            raise InputError(
                f"{self._folder} holds a run with another {name} ({saved.get(name)!r} there, {mine[name]!r} here); "
                "give the same options as then, or save in another folder"
            )
        self._job = replace(self._job, warmup=saved["warmup"])
        return self._job, int(ts.load(self._folder, progress=self._progress, **self._parts)["step"])

    def after(self, step: int, *, last: bool) -> bool:
        """Save if it is time to; whether the run is to go on. ``step``: how many have been taken."""
        due = last or self._asked or (self._every > 0 and step % self._every == 0)
        if self._folder is not None and due:
            self._asked = False
            ts.save(self._folder, **self._parts, step=step, job=self._identity(), progress=self._progress)
        return self.stopped_by is None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGUSR1 asks for a save after the step at hand; SIGINT and SIGTERM also for the end. A second one of
        these ends at once. Without a folder signals do what they always do."""
        if self._folder is None:
            yield
            return
        before = {one: signal.signal(one, self._heard) for one in (*_STOPPING, signal.SIGUSR1)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPPING:
            if self.stopped_by is not None:
                raise KeyboardInterrupt
            self.stopped_by = signal.Signals(number)
        self._asked = True

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with; budgets, homes and the device may change."""
        found = self._job.to_json()
        return {name: found[name] for name in ("config", "data", "batch", "sequence", "optimizer", "warmup", "rate")}
