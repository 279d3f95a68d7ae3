"""Of many alike cases those that CI runs; the others are part of the full product."""

from collections.abc import Iterable
from typing import Any

import pytest

_GOLDEN = (5**0.5 - 1) / 2


def one_in(several: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which about one in ``several`` runs in CI: spread evenly, in whatever product they are of."""
    chosen = (number * _GOLDEN % 1 < 1 / several for number in range(1 << 20))
    return [case if runs else _in_full(case) for case, runs in zip(cases, chosen, strict=False)]


def _in_full(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
