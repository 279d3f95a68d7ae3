"""A training step takes what its plan says: on the virtual clock of a card, with the links of that card."""

import sys
from dataclasses import replace

import pytest
import torch

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("it is the simulated GPU that has a virtual clock", allow_module_level=True)

from scenarios import WIDTH, batch
from simulated_gpu.clock import CARDS, Clock
from timelines import HIDDEN, ROWS, SECONDS, WIDE, Net, machine_of, plan_of, planned, run, streamed, trained

import tapestream as ts


@pytest.mark.parametrize(("update", "slower"), [("step", 1), ("backward", 1), ("backward", 16)])
@pytest.mark.parametrize("name", CARDS)
def test_a_step_takes_what_its_plan_says(clock: Clock, name: str, update: str, slower: int) -> None:
    """A step of the card itself waits for most copies; with slow products, most are hidden."""
    card = replace(CARDS[name], single=CARDS[name].single / slower)
    clock.set(card)
    model = streamed(card, 0.3)
    took, said = trained(clock, card, model, update)
    assert took.nbytes == said.nbytes > 0
    assert took.seconds == pytest.approx(said.seconds, rel=SECONDS)
    assert took.hidden == pytest.approx(said.hidden, abs=HIDDEN)
    assert took.hidden < 0.5 if slower == 1 else took.hidden > 0.4, (took, said)


@pytest.mark.parametrize("name", CARDS)
def test_a_chain_takes_what_its_plan_says(clock: Clock, name: str) -> None:
    """States go to host memory and come back, most of the time behind compute."""
    card = CARDS[name]
    clock.set(card)
    blocks, x = Net(WIDE, 6).blocks.cuda(), torch.ones(ROWS, WIDE, device="cuda")
    tape = 3 * len(blocks) * ROWS * WIDE * 4
    chain = ts.Chain(list(blocks), budget=tape // 2, machine=machine_of(card), home="host", planner="offload")

    def step() -> None:
        torch.autograd.backward(chain(x), x)
        blocks.zero_grad()

    took = run(clock, card, step)
    assert chain.plan is not None
    said = planned(chain.plan)
    assert took.nbytes == said.nbytes > 0
    assert took.seconds == pytest.approx(said.seconds, rel=SECONDS)
    assert took.hidden == pytest.approx(said.hidden, abs=HIDDEN)
    assert took.hidden > 0.5


def test_what_runs_after_the_blocks_is_timed_on_the_device(clock: Clock) -> None:
    """Forward and backward, and not how long the host takes to issue them: on a card so slow that this is nothing."""
    card = replace(CARDS["h100"], single=1e7, memory=1e9)
    clock.set(card)
    model = ts.stream(Net(WIDTH, blocks=2), device="cuda", home="host", budget="80 MiB", machine=machine_of(card))
    x = batch("cuda").requires_grad_()
    model(x).backward()
    torch.cuda.synchronize()
    clock.set(card)
    torch.autograd.backward((x @ x.T).square().mean())
    torch.cuda.synchronize()
    assert plan_of(model).profile.turn_seconds == pytest.approx(clock.host(), rel=0.1)
