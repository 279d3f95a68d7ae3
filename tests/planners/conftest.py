"""What the planner tests share: the published numbers, the exhaustive search, random chains."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ORACLES = Path(__file__).parents[1] / "oracles"
sys.path.insert(0, str(ORACLES))


@pytest.fixture(scope="session")
def published() -> dict[str, Any]:
    return json.loads((ORACLES / "published.json").read_text())
