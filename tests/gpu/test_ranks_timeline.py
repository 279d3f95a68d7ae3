"""Ranks that divide a model: gathers and sums run beside compute, and a step takes what the judge says."""

import sys
from dataclasses import replace

import pytest

if "simulated_gpu.plugin" not in sys.modules:
    pytest.skip("it is the simulated GPU that has a virtual clock", allow_module_level=True)

from fake_peers import Alike
from simulated_gpu.clock import CARDS, Clock
from timelines import HIDDEN, SECONDS, machine_of, streamed, trained

import tapestream as ts
from tapestream.peers.agreement import Agreement


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("name", "update"), [("h100", "step"), ("h100", "backward"), ("rtx4090", "step")])
def test_a_step_takes_what_its_plan_says(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, update: str, ranks: int
) -> None:
    card = replace(CARDS[name], single=CARDS[name].single / 8)  # additions of N parts are in no plan
    clock.set(card)
    machine = replace(machine_of(card), peers=ts.Link(card.peer, card.copy))
    assert machine.peers is not None
    alike = Alike(ranks, clock, machine.peers)
    monkeypatch.setattr(Agreement, "of", classmethod(lambda cls, group: alike))
    model = streamed(card, 0.5, peers=ts.Peers(shard=True), machine=machine)
    took, said = trained(clock, card, model, update)
    assert took.nbytes == said.nbytes > 0
    assert took.seconds == pytest.approx(said.seconds, rel=SECONDS)
    assert took.hidden >= said.hidden - HIDDEN
