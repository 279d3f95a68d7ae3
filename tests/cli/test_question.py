"""A whole step planned, with an embedding and a head that come and go between the blocks."""

import pytest
from competing import COMPETING

from tapestream.cli.costs import costs_of
from tapestream.cli.subject import subject_of
from tapestream.cli.targets import TargetOptions
from tapestream.costs import Machine
from tapestream.costs.machine import usual_links
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.question import Question
from tapestream.ir import Tier


def asked(device: str, flops: float, budget: int) -> Question:
    """A GPT whose embedding and head are several times its blocks."""
    subject = subject_of("gpt", TargetOptions(layers=6, width=512, batch=2, sequence=256, dtype="fp32"))
    return Question(
        costs_of(subject, device).outline, 2, "adamw", "step", device,
        budget=budget, gpu=None, ram=64 << 30, disk=None, home=None,
        speeds=Machine(usual_links(device), flops),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "flops", "mebibytes"), [pytest.param("cpu", 1e11, 435, marks=pytest.mark.full), ("cuda", 6e13, 548)]
)
def test_no_planner_is_faster_than_joint_where_blocks_must_leave_for_others(
    device: str, flops: float, mebibytes: int
) -> None:
    question = asked(device, flops, mebibytes << 20)
    found = question.plan("joint")
    assert found.peak_nbytes(Tier.DEVICE) <= question.budget
    compared = 0
    for name in COMPETING:
        try:
            other = question.plan(name)
        except (BudgetError, InputError):
            continue
        compared += 1
        assert found.fastest_seconds <= other.seconds, name
        assert found.seconds <= 1.03 * other.seconds, name
    assert compared >= 8
