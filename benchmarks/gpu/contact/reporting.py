"""A plugin of pytest: ``--outcomes FILE`` gets a line of JSON for each test as soon as it has ended."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--outcomes", type=Path, help="file to which each test's outcome is added")


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes of pytest-xdist, the one that hears from the others writes."""
    if config.getoption("outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("outcomes")))


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has three phases; what passes is told once, and what does not at the phase that did not."""
        if report.when == "call" or report.outcome != "passed":
            line = {"id": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "why": _why(report)}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has failed too."""
        if report.failed:
            with self.file.open("a") as file:
                line = {"id": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": str(report.longrepr)[-300:]}
                file.write(json.dumps(line) + "\n")


def _why(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return str(text)[:300]
