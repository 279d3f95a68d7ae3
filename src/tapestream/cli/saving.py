"""``tapestream train --saves``: saves of a run, also when a signal asks for one, and going on from them."""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import tapestream as ts
from tapestream.cli.ends import interrupt
from tapestream.cli.loop import Batch, Job, Report
from tapestream.errors import InputError
from tapestream.frontends.saving.folder import Saves
from tapestream.frontends.saving.manifest import is_save
from tapestream.frontends.saving.save import save_nbytes
from tapestream.storage.locked import held_alone
from tapestream.system.signals import ENDING, SAVING, STOPPING

_KEEP = 2  # saves that stay
_RUNNING = ".running"  # in the folder of saves, while a run has it


class Saver:
    """Saves every ``every`` steps (0: only when asked, and at the end), in ``folder``; in none if that is None."""

    def __init__(self, folder: Path | None, every: int, job: Job) -> None:
        self._folder, self._every, self._job = folder, every, job
        self._from = folder  # the last save in it, or a save itself: those to come lie beside that
        if folder is not None and is_save(folder):
            self._folder = folder.resolve().parent
        self._parts: dict[str, Any] = {}
        self._progress: Report | None = None
        self._asked = self._stepped = self._ready = False
        self._step = 0  # how many have been taken
        self._told = ""  # of the last one, in the file of metrics
        self.stopped_by: signal.Signals | None = None

    @contextmanager
    def alone(self, *, resume: bool) -> Iterator[None]:
        """Inside, no other run saves in the folder: each would remove saves of the other. Raises StorageError where one
        does, or there can be no folder; where there is none to ``resume`` from, `begin` says so."""
        if self._folder is None or (resume and not self._folder.is_dir()):
            yield
            return
        Saves(self._folder).check_room(0)
        with held_alone(self._folder, _RUNNING):
            yield

    def begin(self, *, resume: bool) -> tuple[Job, int]:
        """The job, and the steps that were taken: 0, or with ``resume`` those of the last save, whose job keeps the
        warm-up that it had even if more steps are wanted now.

        Raises InputError where there is nothing to resume, the save is of another run or of one that is done, or a new
        run would in time remove the saves of an earlier one.
        """
        if not resume:
            self._refuse_earlier()
            return self._job, 0
        if self._from is None:
            raise InputError("--resume was asked for without --saves; name the folder of the saves")
        found = ts.load(self._from)
        saved, done = {"seed": 0, "dtype": "fp32", **found["job"]}, int(found["step"])
        mine = self._identity()
        other = [name for name in mine if name != "warmup" and saved.get(name) != mine[name]]
        if other:
            what = _difference(other[0], saved.get(other[0]), mine[other[0]])
            raise InputError(
                f"{self._folder} holds a run with another {what}; give the same options as then, or save in another "
                "folder"
            )
        if done >= self._job.steps:
            raise InputError(f"{self._folder} holds a run of {done} steps already; ask for more with --steps")
        self._job = replace(self._job, warmup=saved["warmup"])
        self._step, self._told = done, found.get("told", "")
        return self._job, done

    def check_metrics(self, path: Path, lines: TextIO) -> None:
        """Raise InputError where a file of metrics is of another run: what it says of the last step is something else.
        One with no line in it is as good as a new one."""
        lines.seek(0)
        there = [line.rstrip("\n") for line in lines if self._told]
        if there and self._told not in there:
            raise InputError(
                f"--metrics {path} does not hold step {self._step - 1} of the run in {self._folder}: it is of another "
                "run, or its end is missing; name the file of that run, or a new one"
            )

    def holds(self, parts: dict[str, Any], progress: Report, *, load: bool) -> None:
        """``parts`` are saved, and with ``load`` brought to where the last save was made.

        Raises StorageError where no save can be made: now, and after the first step, not at the end of the training.
        """
        self._parts, self._progress = parts, progress
        if self._from is None:
            return
        self._check_room()
        if load:
            ts.load(self._from, progress=progress, **parts)
        self._ready = True

    def after(self, step: int, *, last: bool, told: str = "") -> bool:
        """Save if it is time to; whether the run is to go on. ``step``: how many have been taken, ``told``: the line
        about the last of them in the file of metrics."""
        stopping = self.stopped_by is not None  # one that is heard from here on stops the run after the next step
        asked, self._asked = self._asked, False
        self._step, self._told = step, told
        due = last or asked or stopping or (self._every > 0 and step % self._every == 0)
        if self._folder is not None and not self._stepped and not due:
            self._check_room()  # also for what the optimizer keeps from now on
        self._stepped = True
        if due:
            self._save()
        return not stopping

    def guarding(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; where one cannot be made, what was done before it is saved, and the error says so."""
        drawn = iter(batches)
        while True:
            try:
                batch = next(drawn)
            except InputError as error:
                if self._folder is None or not self._step:
                    raise
                self._save()
                raise InputError(
                    f"{error} (for step {self._step + 1}; the run is saved after step {self._step}: fix this, then go "
                    "on with --resume)"
                ) from error
            yield batch

    def lost(self, what: str, step: int) -> str:
        """The same as `guarding` where nothing can be told of the last of ``step`` steps: save, and say so behind
        ``what``."""
        if self._folder is None:
            return what
        self._step, self._told = step, ""
        self._save()
        return f"{what} (the run is saved after step {self._step}: fix this, then go on with --resume)"

    def _save(self) -> None:
        if self._folder is not None:
            job, step, told = self._identity(), self._step, self._told
            parts = {**self._parts, "step": step, "job": job, "told": told}
            ts.save(self._folder, **parts, progress=self._progress, keep=_KEEP)

    def _check_room(self) -> None:
        """For as many saves as will be there at once: those that are kept, and the next before the oldest goes."""
        assert self._folder is not None
        saves, to_come = Saves(self._folder), -(-self._job.steps // self._every) if self._every else 1
        saves.check_room(save_nbytes(**self._parts), max(1, min(to_come, _KEEP + 1 - len(saves.complete()))))

    def _refuse_earlier(self) -> None:
        found = Saves(self._folder).complete() if self._folder is not None else []
        if found:
            raise InputError(
                f"{self._folder} holds saves of an earlier run, the last of them {found[-1].name}, which a new run "
                "would remove; go on with it (--resume), or name another folder"
            )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGUSR1 asks for a save after the step at hand or, before the training, the first one; those in
        STOPPING also for the end. A second one of these ends at once, as does one before the training: there is nothing
        to save yet. Without a folder signals do what they always do; Windows has no SIGUSR1."""
        if self._folder is None:
            yield
            return
        ignored = [one for one in ENDING if signal.getsignal(one) is signal.SIG_IGN]  # by nohup
        before = {one: signal.signal(one, self._heard) for one in (*STOPPING, *SAVING) if one not in ignored}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number in STOPPING:
            if self.stopped_by is not None:
                _tell(b"\nstopping at once: steps since the last save are lost; --resume takes them again\n")
            if self.stopped_by is not None or not self._ready:
                interrupt(number, frame)
            self.stopped_by = signal.Signals(number)
            _tell(b"\nstopping with a save after this step; once more stops at once, without one\n")
        self._asked = True

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with; budgets, homes and the device may change."""
        found = self._job.to_json()
        same = ("config", "data", "batch", "sequence", "optimizer", "warmup", "rate", "seed", "dtype")
        return {name: found[name] for name in same}


def _tell(words: bytes) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, words)


def _difference(name: str, there: Any, here: Any) -> str:
    """What of it differs first."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in here:
            if there.get(key) != here[key]:
                return _difference(f"{name}: {key}" if name == "config" else key, there.get(key), here[key])
    return f"{name} ({there!r} there, {here!r} here)"
