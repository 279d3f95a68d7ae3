"""Models and helpers are those of the front-ends' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends"))
