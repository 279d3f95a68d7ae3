"""Lightning's Trainer in two processes, with a checkpoint in between: the bits that it has by its own DDP."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

sys.path.append(str(Path(__file__).parents[1]))
from torchrun import in_two_processes

SCRIPT = Path(__file__).with_name("trained_by_lightning.py")


@pytest.mark.on_cpu("c10d knows no simulated GPU")
def test_the_bits_of_its_own_way(tmp_path: Path) -> None:
    in_two_processes(SCRIPT, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for found in ranks:
        assert found["copies"] == found["plain"]
        assert found["divided"] == found["plain"]
    assert ranks[0]["plain"][-1] == ranks[1]["plain"][-1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_nobody_would_average_is_named() -> None:
    from lightning.pytorch import LightningModule

    strategy, module = ts.LightningStrategy(), LightningModule()
    module.inside = ts.stream(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), device="cpu", budget="1MiB")
    strategy.connect(module)
    strategy.configure_ddp()
    module.left = nn.Parameter(torch.ones(1))
    with pytest.raises(InputError, match=r"1 trained parameters of this LightningModule \('left' first\)"):
        strategy.configure_ddp()
