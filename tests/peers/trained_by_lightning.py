"""What torchrun starts in `test_lightning`: Lightning's Trainer, with its own DDP or around a streamed model."""

import hashlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

import lightning  # noqa: E402
from torch import nn  # noqa: E402
from trainings import made, one_length  # noqa: E402

import tapestream as ts  # noqa: E402


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> torch.Tensor:
        return one_length(0, number)


class Module(lightning.LightningModule):
    """``how``: "plain", "copies", "divided"; else it has a parameter that nobody averages."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__()
        self.how, self.folder, self.losses, self.model = how, folder, list[float](), None
        self.left = nn.Parameter(torch.ones(1), requires_grad=how not in ("plain", "copies", "divided"))

    def configure_model(self) -> None:
        if self.model is None:
            self.model = made()
            if self.how != "plain":
                peers = ts.Peers(shard=self.how == "divided")
                home = {"device": "cpu", "home": "disk", "folder": self.folder / "homes"}
                ts.stream(self.model, budget="300KiB", peers=peers, **home)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(batch.flatten(0, 1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.how == "plain":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        return ts.optimizer(self.model, torch.optim.AdamW, lr=1e-2, foreach=False)


def trained(how: str, folder: Path, steps: int, resume: Path | None = None) -> tuple[Module, lightning.Trainer]:
    strategy: Any = lightning.pytorch.strategies.DDPStrategy if how == "plain" else ts.LightningStrategy
    more = {"find_unused_parameters": True} if how == "plain" else {}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(process_group_backend="gloo", **more), max_steps=steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5,
    )  # fmt: skip
    module = Module(how, folder)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=2), ckpt_path=resume, weights_only=True)
    return module, trainer


def found(how: str, folder: Path) -> list[Any]:
    """Losses of this rank, and a hash of the weights, with a checkpoint in between."""
    module, trainer = trained(how, folder, 2)
    trainer.save_checkpoint(folder / f"{how}.ckpt")
    losses = module.losses
    if how != "plain":
        ts.unstream(module.model)
    module, _ = trained(how, folder, 4, folder / f"{how}.ckpt")
    if how != "plain":
        ts.unstream(module.model)
    weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in module.model.parameters())
    return [*losses, *module.losses, hashlib.sha1(weights).hexdigest()]


def main(said: str) -> None:
    torch.set_num_threads(1)
    every = {how: found(how, Path(said)) for how in ("plain", "copies", "divided")}
    Path(said, f"{os.environ['RANK']}.json").write_text(json.dumps(every), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
