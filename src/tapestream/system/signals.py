"""Signals that not every system has."""

import signal

ENDING = tuple(one for one in (signal.SIGTERM, getattr(signal, "SIGHUP", None)) if one is not None)
"""Those by which others end a process; the second one says that its terminal was closed (Windows has none)."""
STOPPING = (signal.SIGINT, *ENDING)
"""Those that end a process which does not listen to them."""
SAVING = tuple(one for one in (getattr(signal, "SIGUSR1", None),) if one is not None)
"""The one that asks a run for a save; none where the system has none to spare (Windows)."""
