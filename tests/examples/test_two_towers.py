"""The example of two towers: it learns, and its losses are those of plain PyTorch."""

import pytest
import torch
import two_towers

import tapestream as ts


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        two_towers.main(["--help"])
    assert stopped.value.code == 0
    assert (two_towers.__doc__ or "").splitlines()[0] in capsys.readouterr().out


def test_losses_are_those_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pictures", "5", "--captions", "2", "--width", "16", "--batch", "32", "--steps", "25"]
    within = two_towers.main([*sizes, "--budget", "150KiB"])
    said = capsys.readouterr().out
    assert "plan for 11 stages by join" in said
    assert "forwards  11 for" not in said  # something was recomputed
    with monkeypatch.context() as changed:
        changed.setattr(ts, "Join", Plain)
        stored = two_towers.main(sizes)
    assert within == stored
    assert within[-1] < 0.8 * within[0]


class Plain(torch.nn.Module):
    """What a Join computes, written out."""

    def __init__(self, branches: list[list[torch.nn.Module]], head: torch.nn.Module, **_: object) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(torch.nn.Sequential(*stages) for stages in branches)
        self.head, self.plan = head, None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(*(tower(x) for tower, x in zip(self.towers, inputs, strict=True)))
        return out
