"""The examples of loops: what they compute equals plain PyTorch, and what they fit improves."""

import importlib.util
from pathlib import Path

import loop_hypergradient
import loop_ode
import loop_text
import loop_wave
import pytest
import torch
from torch import nn


@pytest.mark.parametrize("example", [loop_hypergradient, loop_ode, loop_text, loop_wave])
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


def test_ode_tells_its_last_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "8", "--rounds", "22", "--width", "2", "--until", "0.2", "--positions", "3"]
    loop_ode.main([*sizes, "--tolerance", "1e-2", "--budget", "200KiB", "--out", str(tmp_path)])
    assert "round 22/22" in capsys.readouterr().out


def test_ode(tmp_path: Path) -> None:
    sizes = ["--steps", "150", "--rounds", "2", "--width", "4", "--until", "1.5", "--positions", "4"]
    misfits, found = loop_ode.main([*sizes, "--tolerance", "1e-4", "--budget", "200KiB", "--out", str(tmp_path)])
    assert (tmp_path / "loop_ode.png").stat().st_size > 1000
    assert misfits[-1] < misfits[0]
    for solver in ("Runge-Kutta, Loop", "Dormand-Prince, Loop"):
        error, nbytes = found[solver]
        assert error < 1e-2
        assert nbytes < 200 * 1024
    if importlib.util.find_spec("torchdiffeq") is None:
        assert len(found) == 2
        return
    assert found["Runge-Kutta, Loop"][1] < found["Runge-Kutta, odeint"][1]
    assert found["Runge-Kutta, Loop"][0] < found["Dormand-Prince, odeint_adjoint"][0]


def test_an_adaptive_solver_gives_the_gradient_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    task, field = loop_ode.Task.spiral(4, 2.0), loop_ode.Field(4).double()
    misfit = loop_ode.adaptively(field, task, 1e-4, "200KiB")()
    ours = torch.autograd.grad(misfit, list(field.parameters()))

    step, state, steps = loop_ode.adaptive_step(field, task, 1e-4), (), 0
    state = task.positions[0], torch.zeros((), dtype=torch.float64), 0.0, 0.01, 0
    while state[4] < 3:
        state, steps = step(state), steps + 1
    assert steps > 3
    theirs = torch.autograd.grad(state[1], list(field.parameters()))
    assert torch.equal(misfit, state[1])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_hypergradient(tmp_path: Path) -> None:
    sizes = ["--steps", "200", "--rounds", "3", "--budget", "60KiB"]
    losses = loop_hypergradient.main([*sizes, "--out", str(tmp_path)])
    assert (tmp_path / "loop_hypergradient.png").stat().st_size > 1000
    assert losses[-1] < losses[0]

    train, other = (loop_hypergradient.Examples.drawn(n, 20, seed) for n, seed in ((60, 1), (1000, 2)))
    optimizer = torch.optim.Adam((hyper := loop_hypergradient.Hyper(20)).parameters(), lr=0.3)
    theirs = []
    for _ in range(3):
        state, step = (torch.zeros(20), torch.zeros(20)), loop_hypergradient.sgd(hyper, train)
        for numbers in loop_hypergradient.batches(200, 16, 60):
            state = step(state, numbers)
        loss = other.loss(state[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert losses == theirs
