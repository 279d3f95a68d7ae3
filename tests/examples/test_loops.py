"""The examples of loops: what they compute equals plain PyTorch, and what they fit improves."""

from pathlib import Path

import loop_text
import loop_wave
import pytest
import torch
from torch import nn


@pytest.mark.parametrize("example", [loop_text, loop_wave])
def test_help(example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert example.__doc__.splitlines()[0] in said
    assert "--budget" in said


def test_text(tmp_path: Path) -> None:
    sizes = ["--steps", "150", "--texts", "3", "--width", "8", "--epochs", "3"]
    ours = loop_text.main([*sizes, "--budget", "100KiB", "--out", str(tmp_path)])
    assert (tmp_path / "loop_text.png").stat().st_size > 1000

    given = loop_text.parser().parse_args(sizes)
    torch.manual_seed(0)
    pairs, characters = loop_text.text_of(None, 3, 150)
    reader = loop_text.Reader(characters, 8)
    optimizer = torch.optim.Adam(reader.parameters(), lr=given.lr)
    theirs = []
    for _ in range(3):
        state, total = (torch.zeros(3, 8), torch.zeros(3, 8)), 0
        for pair in pairs:
            state, loss = reader(state, pair)
            total = total + loss
        optimizer.zero_grad()
        (total / 150).backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        theirs.append(float(total.detach() / 150))
    assert ours == theirs


def test_wave(tmp_path: Path) -> None:
    sizes = ["--steps", "150", "--size", "24", "--sources", "3", "--rounds", "4"]
    misfits = loop_wave.main([*sizes, "--budget", "900KiB", "--out", str(tmp_path)])
    assert (tmp_path / "loop_wave.png").stat().st_size > 1000
    assert misfits[-1] < 0.2 * misfits[0]

    given = loop_wave.parser().parse_args([*sizes, "--budget", "900KiB"])
    speed, pulse = loop_wave.buried(24).requires_grad_(), torch.zeros(3, 24, 24)
    (ours,) = torch.autograd.grad(loop_wave.recordings(speed, given).square().sum(), speed)
    for number, depth in enumerate((6, 12, 18)):
        pulse[number, depth, 3] = 1.0
    dt = 0.4
    step, state, found = loop_wave.wave_step(speed, pulse, dt), (torch.zeros(3, 24, 24),) * 2, []
    for number, amplitude in enumerate(loop_wave.ricker(150, dt)):
        state, row = step(state, amplitude)
        if number % 2:
            found.append(row)
    (theirs,) = torch.autograd.grad(torch.stack(found).square().sum(), speed)
    assert torch.equal(ours, theirs)
