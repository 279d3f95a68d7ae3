"""A small training run that saves as it goes, also as a process of its own: ``python running.py JSON``; without JSON
a process that forks one for each line of JSON it is given, which saves their imports."""

import hashlib
import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tapestream as ts
from tapestream.models.gpt import GPT, GPTConfig


class Data:
    """An endless stream of batches, which remembers where it is."""

    def __init__(self, length: int) -> None:
        self.generator, self.taken, self.length = torch.Generator().manual_seed(1), 0, length

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.taken += 1
        tokens = torch.randint(0, 64, (2, self.length + 1), generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


class Run:
    """A model with dropout, its optimizer, a schedule and the data; in ``bfloat16`` it has fp32 masters."""

    def __init__(self, folder: Path | None, layers: int = 3, width: int = 32, length: int = 8, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        bfloat16 = options.pop("bfloat16", False)
        self.device = "cuda" if "simulated_gpu.plugin" in sys.modules else "cpu"
        with torch.device(options.pop("made_on", "cpu")):
            self.model: nn.Module = GPT(GPTConfig(layers, width, 2, vocabulary=64, context=length, dropout=0.1))
        if bfloat16:
            self.model.to(torch.bfloat16)
        if folder is not None:
            home = options.pop("home", "disk")
            options |= {"folder": folder} if home == "disk" else {}
            self.model = ts.stream(self.model, device=self.device, home=home, **options)
            self.optimizer: Any = ts.optimizer(self.model, torch.optim.AdamW, lr=1e-2, update="backward")
        else:
            self.model.to(self.device)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.data, self.step = Data(length), 0

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "data": self.data}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens, wanted = self.data.batch()
            loss = self.model(tokens.to(self.device), wanted.to(self.device)) * random.random()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(float(loss.detach()))
        return losses

    def save(self, path: Path, **options: Any) -> Path:
        return ts.save(path, **self.parts, step=self.step, **options)

    def load(self, path: Path) -> None:
        self.step = ts.load(path, **self.parts)["step"]

    def digest(self) -> str:
        """Of every bit of the parameters and of the optimizer's state."""
        found = hashlib.sha256()
        states = self.optimizer.state_dict()["state"]
        for state in (self.model.state_dict(), *(states[number] for number in sorted(states))):
            for _, value in sorted(state.items()):
                found.update(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class Operations:
    """File operations of the main thread within saves. The process is killed just before one of them, as by
    ``kill -9``: in save ``number``, from 1 on, when ``part`` of as many have been as the save before it took."""

    def __init__(self, number: int, part: float) -> None:
        self._number, self._part = number, part
        self._saves, self._seen, self._last = 0, 0, -1
        self._counting = False
        sys.addaudithook(self._heard)

    def __enter__(self) -> None:
        if self._saves == self._number > 0:
            self._last = int(self._part * self._seen)
        self._counting, self._seen = True, 0

    def __exit__(self, *_: object) -> None:
        self._counting = False
        self._saves += 1

    def _heard(self, event: str, _: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        if self._counting and main and event.startswith(("open", "os.", "shutil.")):
            if self._seen == self._last:
                self._counting = False  # the next line is one too
                os.kill(os.getpid(), signal.SIGKILL)
            self._seen += 1


def say(line: str) -> None:
    """All of it or, when killed, nothing."""
    os.write(1, f"{line}\n".encode())


def main(job: dict[str, Any]) -> None:
    """Go on from the last save, if there is one, saving after every step. ``most``: steps to take, then to wait for the
    end; ``killed_in``: the save of this process, from 1 on, and the part of it, that it does not live to see."""
    torch.set_num_threads(1)
    home, saves = Path(job["home"]), Path(job["saves"])
    if job.get("allowed"):
        Run(home).save(home / "warm")
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        data = next(int(words[1]) * 1024 for words in lines if words[0] == "VmData:")
        resource.setrlimit(resource.RLIMIT_DATA, (data + job["allowed"],) * 2)
    operations = Operations(*job.get("killed_in", (0, 0.0)))
    say(f"ready {os.getpid()}")
    run = Run(home, **job.get("options", {}))
    if saves.exists() and any(saves.glob("0*/manifest.json")):
        run.load(saves)
    for _ in range(min(job["steps"] - run.step, job.get("most", job["steps"]))):
        run.train(1)
        with operations:
            run.save(saves)
        say("saved")
    if run.step < job["steps"]:
        signal.pause()
    say(json.dumps({"digest": run.digest()}))


def nursery() -> None:
    """One child at a time; says afterwards how it ended."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            main(json.loads(line))
            return
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1])) if sys.argv[1:] else nursery()
