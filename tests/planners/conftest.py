"""What the planner tests share: the published numbers, and more."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def published() -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "oracles" / "published.json").read_text())
