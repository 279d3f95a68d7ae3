"""The example of a program: its gradient is plain PyTorch's, and what it fits improves."""

import re
from pathlib import Path

import program_particles
import pytest
import torch

import tapestream as ts


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        program_particles.main(["--help"])
    assert stopped.value.code == 0
    assert program_particles.__doc__.splitlines()[0] in capsys.readouterr().out


def test_particles(tmp_path: Path) -> None:
    sizes = ["--particles", "60", "--steps", "25", "--rounds", "3", "--budget", "400KiB"]
    misfits, _, held = program_particles.main([*sizes, "--out", str(tmp_path)])
    assert misfits[-1] < misfits[0]
    assert held <= 400 * 1024
    for name in ("program_particles.png", "program_particles_memory.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.full
def test_particles_that_are_recomputed_have_the_gradient_of_a_plain_loop() -> None:
    positions = (torch.rand(100, 2, generator=torch.Generator().manual_seed(0)) - 0.5) / 3
    velocities = torch.zeros_like(positions).requires_grad_()
    given = positions, velocities, program_particles.rings(8), 60
    (theirs,) = torch.autograd.grad(program_particles.misfit(*given), velocities)
    with pytest.raises(ts.BudgetError) as error:
        ts.Program(program_particles.misfit, budget=1)(*given)
    assert error.value.least_nbytes is not None
    run = ts.Program(program_particles.misfit, budget=error.value.least_nbytes * 11 // 10)
    for _ in range(3):  # as it goes, by a quick plan, by the best
        (ours,) = torch.autograd.grad(run(*given), velocities)
        assert torch.equal(ours, theirs)
    assert run.report is not None
    assert run.report.reruns > 0


def test_the_small_command_of_the_docstring_recomputes() -> None:
    command = re.search(r"--particles (\d+) --steps (\d+) .*--budget (\w+)", program_particles.__doc__ or "")
    assert command is not None
    positions = torch.rand(int(command[1]), 2, generator=torch.Generator().manual_seed(0)) - 0.5
    run = ts.Program(program_particles.misfit, budget=command[3])
    velocities = torch.zeros_like(positions).requires_grad_()
    found = run.explain(positions, velocities, program_particles.rings(100), int(command[2]))
    assert found.sums()["recomputed"][0] > 100


def test_the_last_round_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--particles", "10", "--steps", "2", "--rounds", "22", "--budget", "400KiB"]
    program_particles.main([*sizes, "--out", str(tmp_path)])
    assert "round 22/22" in capsys.readouterr().out
