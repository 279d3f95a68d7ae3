"""A small training run that saves as it goes, also as a process of its own: ``python running.py JSON``."""

import hashlib
import json
import random
import resource
import sys
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
        with torch.device(options.pop("made_on", "cpu")):
            self.model: nn.Module = GPT(GPTConfig(layers, width, 2, vocabulary=64, context=length, dropout=0.1))
        if bfloat16:
            self.model.to(torch.bfloat16)
        if folder is not None:
            home = options.pop("home", "disk")
            options |= {"folder": folder} if home == "disk" else {}
            self.model = ts.stream(self.model, device="cpu", home=home, **options)
            self.optimizer: Any = ts.optimizer(self.model, torch.optim.AdamW, lr=1e-2, update="backward")
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.data, self.step = Data(length), 0

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "data": self.data}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(*self.data.batch()) * random.random()
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


def main(job: dict[str, Any]) -> None:
    """Go on from the last save, if there is one, saving after every step."""
    torch.set_num_threads(1)
    home, saves = Path(job["home"]), Path(job["saves"])
    if job.get("allowed"):
        Run(home).save(home / "warm")
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        data = next(int(words[1]) * 1024 for words in lines if words[0] == "VmData:")
        resource.setrlimit(resource.RLIMIT_DATA, (data + job["allowed"],) * 2)
    run = Run(home, **job.get("options", {}))
    if saves.exists() and any(saves.glob("0*/manifest.json")):
        run.load(saves)
    print("ready", flush=True)
    while run.step < job["steps"]:
        run.train(1)
        run.save(saves)
    print(json.dumps({"digest": run.digest()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
