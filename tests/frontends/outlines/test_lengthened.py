"""The outline of a shallow model, lengthened, is that of the deep one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tapestream.cli.costs import costs_of
from tapestream.cli.subject import subject_of
from tapestream.cli.targets import TargetOptions
from tapestream.costs.rates import usual_rates
from tapestream.frontends.outlines.lengthened import lengthened
from tapestream.frontends.outlines.outline import Outline
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.question import Variant
from tapestream.models import GPT, GPTConfig
from tapestream.models.gpt import Block

CONFIG = GPTConfig(layers=9, width=32, heads=2, vocabulary=90, context=16)


def _outline(config: GPTConfig, **wishes: Any) -> Outline:
    with torch.device("meta"):
        model, batch = GPT(config).train(), tuple(torch.randint(9, (2, 16)) for _ in range(2))
    return outline(model, batch, **wishes)


def _facts(found: Outline) -> list[object]:
    rates = usual_rates("cuda")
    return [
        *(found.profiles(rates=rates, update=update, budget_nbytes=10**5) for update in ("step", "backward")),
        found.uses, found.wide, len(found.modules), found.parameters, found.flops, found.before_nbytes,
        found.turn_nbytes, found.look_up, [(s.positions, s.carried, sorted(s.spans)) for s in found.segments],
    ]  # fmt: skip


@pytest.mark.parametrize("wishes", [{}, {"moves": False}, {"loss_chunks": 4}, {"device": "cuda"}])
@pytest.mark.parametrize("different", [{}, {"tied": False}, {"halves": True}, {"dtype": torch.bfloat16}])
def test_it_is_that_of_the_deep_model(different: dict[str, Any], wishes: dict[str, Any]) -> None:
    config = replace(CONFIG, **different)
    blocks = 2 if config.halves else 1
    short = _outline(replace(config, layers=4), **wishes)
    assert _facts(lengthened(short, range(blocks, 2 * blocks), 5)) == _facts(_outline(config, **wishes))


def test_blocks_that_share_parameters_are_refused() -> None:
    with pytest.raises(AssertionError):
        lengthened(_outline(replace(CONFIG, layers=4, shared=True)), range(1, 2), 5)


def test_a_command_makes_few_blocks_of_a_deep_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    own = Block.__init__

    def noted(self: Block, config: GPTConfig, index: int, **rest: Any) -> None:
        made.append(index)
        own(self, config, index, **rest)

    monkeypatch.setattr(Block, "__init__", noted)
    wish = TargetOptions(500, 32, 2, 90, 1, 16, "fp32", ())
    costs = costs_of(subject_of("gpt", wish), "cuda")
    found = costs.outline(Variant(1))
    assert len(made) == 4
    assert found.wide == 500
    assert found.parameters == costs.facts(1)["parameters"]
