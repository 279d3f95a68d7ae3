"""`models.estimate` against PyTorch itself."""

import pytest
import torch

from tapestream.cli.demo import plain_nbytes
from tapestream.cli.loop import Job
from tapestream.errors import InputError
from tapestream.models import GPT, GPTConfig
from tapestream.models.estimate import estimate, optimizer_state_factor
from tapestream.planning.profile import profile_stages
from tapestream.runner.stage import Stage
from tapestream.runner.state import take_apart
from tapestream.storage.meter import track_memory

CONFIG = GPTConfig(3, 128, 4, vocabulary=256, context=64)


def test_a_layers_bytes_are_those_that_profiling_finds() -> None:
    model = GPT(CONFIG)
    state, _ = take_apart(torch.randn(2, 64, 128, requires_grad=True))
    stages = [Stage(k, block) for k, block in enumerate(model.blocks)]
    measured, _, _ = profile_stages(stages, state, torch.device("cpu"))
    found = estimate(CONFIG, batch=2, sequence=64, flops_per_second=1e12, update="backward")
    real, computed = measured.stages[1], found.stages[1]
    for name in ("output_nbytes", "saved_nbytes", "cotangent_bytes", "reads_input", "reads_output"):
        assert getattr(computed, name) == getattr(real, name), name
    assert computed.forward_extra_nbytes == pytest.approx(real.forward_extra_nbytes, rel=0.05)
    assert computed.backward_extra_nbytes >= real.backward_extra_nbytes


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


@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad", "rmsprop", "sgd"])
def test_optimizers_keep_as_many_tensors_as_is_said(name: str) -> None:
    classes = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD,
    }  # fmt: skip
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = classes[name]([parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    kept = [t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
    assert len(kept) == optimizer_state_factor(name)


def test_sixteen_bits_add_a_master() -> None:
    wide = estimate(CONFIG, batch=1, sequence=64, flops_per_second=1e12).blocks[0]
    config = GPTConfig(3, 128, 4, vocabulary=256, context=64, dtype=torch.bfloat16)
    narrow = estimate(config, batch=1, sequence=64, flops_per_second=1e12).blocks[0]
    assert narrow.parameters_nbytes == pytest.approx(wide.parameters_nbytes / 2, rel=0.02)
    assert narrow.optimizer_state_nbytes == pytest.approx(3 * wide.parameters_nbytes, rel=0.02)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="1 to 64"):
        estimate(CONFIG, batch=1, sequence=65, flops_per_second=1e12)
