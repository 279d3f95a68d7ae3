"""Entry point of the console script: beside the package, since Ctrl-C is pressed while that is imported, too."""

import os
import signal
from types import FrameType


def main() -> None:
    """The ``tapestream`` command."""
    before = signal.signal(signal.SIGINT, _stop)
    # A handler, not `except KeyboardInterrupt`: modules that are being imported turn that into errors of their own.
    from tapestream.cli.app import make_app

    app = make_app()
    signal.signal(signal.SIGINT, before)
    app()


def _stop(number: int, _frame: FrameType | None) -> None:
    """Nothing has begun that would have to be put right."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)
