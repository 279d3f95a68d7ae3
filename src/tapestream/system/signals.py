"""Signals that not every system has."""

import signal

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Those that end a process which does not listen to them."""
SAVING = tuple(one for one in (getattr(signal, "SIGUSR1", None),) if one is not None)
"""The one that asks a run for a save; none where the system has none to spare (Windows)."""
