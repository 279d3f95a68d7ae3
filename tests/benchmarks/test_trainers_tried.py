"""Trainers around streamed models, of packages that are always here: rows of docs/compatibility.md, run again."""

import pytest

from benchmarks.compatibility.side import TrainerCase
from benchmarks.compatibility.trainers import cases
from benchmarks.compatibility.trial import difference, least
from tapestream.errors import InputError

EXACT = (
    "Trainer (the best model at the end)",
    "Trainer (LoRA of PEFT, resuming)",
    "accelerate (accumulate and clip)",
    "Lightning's Trainer (accumulating and clipping)",
    "Lightning's Trainer (resuming)",
    "a loop with GradScaler",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.on_cpu("trainers are told to use it"),
]


def tried(name: str) -> TrainerCase:
    found = next((one for one in cases() if one.name == name), None)
    if found is None:
        pytest.skip("its package is not installed")
    return found


@pytest.mark.parametrize("name", EXACT)
def test_the_bits_of_plain_in_the_least_budget(name: str) -> None:
    case = tried(name)
    assert difference(case.plain(), least(case, "disk")) is None


def test_adapters_that_a_trainer_adds_are_refused_and_the_advice_works() -> None:
    with pytest.raises(InputError, match="once the trainer is made"):
        tried("SFTTrainer (peft_config)").streamed("device", "16GiB")
    late = tried("SFTTrainer (peft_config, streamed once it is made)")
    assert difference(late.plain(), least(late, "disk")) is None
