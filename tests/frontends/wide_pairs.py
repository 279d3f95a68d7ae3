"""A plain model and one whose embedding and head come and go, side by side."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, both, sgd
from streamable import Model
from streaming import budget_at, options_of, streamed
from torch import nn
from wordy import Words, words

from tapestream.frontends.module.stream import handle_of

CASES = {"tied": Model(Words, words), "untied": Model(lambda: Words(tied=False, bias=True), words)}
Run = Callable[[Any, Any], None]


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.full)])
def case(request: Any) -> Model:
    return CASES[request.param]


@pytest.fixture
def pair(case: Model, tmp_path: Path) -> Iterator[Pair]:
    """A plain model and one streamed under the least budget, with an optimizer each."""
    yield from paired(case, tmp_path)


def paired(case: Model, folder: Path) -> Iterator[Pair]:
    options = options_of("adversarial", folder / "home")
    theirs = case.model()
    with streamed(case, budget_at("least", case, sgd, **options), **options) as ours:
        trained = [p for p in theirs.parameters() if p.requires_grad]
        yield theirs, ours, torch.optim.SGD(trained, lr=0.05, momentum=0.9), sgd(ours)


def together(case: Model, folder: Path, run: Run, steps: int = 3) -> None:
    """``run`` on a plain and on a streamed model; compare all."""
    for pair in paired(case, folder):
        both(pair, run, steps)
        assert coming(pair[1])


def coming(model: Any) -> list[nn.Module]:
    """The modules beside the blocks that came and went in the last call."""
    handle = handle_of(model)
    assert handle.last is not None
    found = [k for segment in handle.last.segments for k in segment.positions if k >= handle.wide]
    return [handle.blocks[k] for k in dict.fromkeys(found)]


def learn(model: Any, _: Any = None) -> None:
    model(*words()).backward()
