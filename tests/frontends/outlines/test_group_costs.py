"""What is said of parameters, optimizers and a stored step before any exists, against PyTorch itself."""

import pytest
import torch
from torch import nn

from tapestream.cli.checks import OPTIMIZERS
from tapestream.cli.demo import plain_nbytes
from tapestream.cli.loop import Job, optimizer_class
from tapestream.errors import InputError
from tapestream.frontends.outlines.group_costs import block_costs
from tapestream.frontends.outlines.optimizers import state_of
from tapestream.models import GPT, GPTConfig
from tapestream.storage.meter import track_memory

CONFIG = GPTConfig(3, 128, 4, vocabulary=256, context=64)


def test_a_stored_step_takes_what_is_computed_for_it() -> None:
    """With everything stored, plain PyTorch is the judge: its peak over one step with AdamW."""
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(256, (2, 64))

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = sum(p.nbytes * 3 for p in model.parameters())
    with track_memory() as meter:
        step()
    job = Job(CONFIG, "stdlib", 2, 64, 1, 1e-3, 1, "adamw", "step", "cpu", None, None, "auto", None)
    assert plain_nbytes(job) == pytest.approx(held + meter.peak_nbytes, rel=0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_keep_as_many_tensors_as_is_said(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = optimizer_class(name)([parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    kept = [t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
    assert len(kept) == len(state_of(name, (4,), torch.float32)[0].tensors)


def test_sixteen_bits_add_a_master() -> None:
    wide, narrow = (list(nn.Linear(256, 256, dtype=dtype).parameters()) for dtype in (torch.float32, torch.bfloat16))
    (full,), (half,) = (block_costs([group], "adamw", 1e9) for group in (wide, narrow))
    assert half.parameters_nbytes == pytest.approx(full.parameters_nbytes / 2, rel=0.02)
    assert half.optimizer_state_nbytes == pytest.approx(3 * full.parameters_nbytes, rel=0.02)
    assert half.gradient_nbytes == half.parameters_nbytes


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'no_such' was asked for; give adamw"):
        state_of("no_such", (4,), torch.float32)
