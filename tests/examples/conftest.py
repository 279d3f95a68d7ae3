"""The examples run in this process, small; one thread, so that the sums of parallel kernels are made in one order."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
pytest.importorskip("transformers", reason="the examples need transformers")
pytest.importorskip("peft", reason="the examples need peft")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


@pytest.fixture(autouse=True)
def _whole_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Axes of pictures that count epochs or rounds have no ticks between them."""
    drawn, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (drawn.append(figure), close(figure)))
    yield
    counting = [axis for figure in drawn for axis in figure.axes if axis.get_xlabel() in ("epoch", "round")]
    assert len(counting) == len(drawn)
    for axis in counting:
        assert all(float(tick).is_integer() for tick in axis.get_xticks())
