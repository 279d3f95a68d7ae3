"""Writes into views: which stages become one, and what is made equal where they need not."""

import torch
from torch import nn

from tapestream.runner.join import join, views_written, with_dense
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import take_apart

CPU = torch.device("cpu")


def test_a_cotangent_leaves_with_the_strides_that_a_view_gives_it() -> None:
    """Plain PyTorch copies the gradient of a view that was written into to the strides of what is behind it."""
    stages = [Stage(0, nn.Linear(4, 4)), Stage(1, lambda x: x.mul_(2.0))]
    state, _ = take_apart(torch.randn(2, 3, 4))
    written = views_written(stages, state, CPU)
    assert written.stretches == ()
    assert written.dense == (frozenset(), frozenset({0}))
    leaves = tuple(stages[0].parameters())
    traits = with_dense([Traits(leaves=leaves), Traits(mutates=frozenset({0}))], written)
    runner = Runner(stages, traits, CPU)
    _, tape = runner.record(1, [runner.forward(0, [state])])
    turned = torch.randn(3, 2, 4).transpose(0, 1)
    (cotangent,), pairs = runner.backward(1, tape, [turned], {})
    assert cotangent is not None
    assert cotangent.is_contiguous()
    assert torch.equal(cotangent, 2.0 * turned)
    assert pairs == []


def test_joined_stages_are_as_many_and_do_the_same() -> None:
    def view(x: torch.Tensor) -> torch.Tensor:
        return (x + 1.0).transpose(0, 1)

    functions = [nn.Linear(4, 4), view, nn.ReLU(inplace=True), torch.tanh]
    stages = [Stage(k, function) for k, function in enumerate(functions)]
    x = torch.randn(3, 4)
    written = views_written(stages, take_apart(x)[0], CPU)
    assert written.stretches == (range(1, 3),)
    joined = join(stages, written.stretches)
    assert len(joined) == len(stages)
    assert joined[0] is stages[0]
    assert joined[3] is stages[3]
    y = x
    for stage, passes in zip(joined, (False, True, False, False), strict=True):
        before, y = y, stage.function(y)
        assert (y is before) == passes
    expected = x
    for stage in stages:
        expected = stage.function(expected)
    assert torch.equal(y, expected)
    assert views_written(joined, take_apart(x)[0], CPU).stretches == ()
