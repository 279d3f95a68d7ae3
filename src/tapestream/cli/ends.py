"""How commands end: with one line for what went wrong, and the status that scripts expect."""

import errno
import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer

from tapestream.cli.told import told
from tapestream.errors import TapestreamError
from tapestream.system.signals import ENDING, STOPPING

P = ParamSpec("P")
R = TypeVar("R")

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO)


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Ends a command as people and scripts expect: exit 2 and one red line for tapestream's own errors, 130 for Ctrl-C.

    SIGTERM (exit 143) and SIGHUP (129), unless it is ignored (nohup), are taken as Ctrl-C, so that all leave by way of
    Python's own end, where home files are removed.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _listen({one: interrupt for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN})
        try:
            return command(*args, **kwargs)
        except TapestreamError as error:
            _failure(told(str(error)))
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what waits to be written would fail again at the end
            _failure(f"cannot write the output: {error.strerror}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            with suppress(OSError):  # the terminal may be gone
                _failure("stopped")
            number = error.number if isinstance(error, Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from error
        finally:
            _listen(before)

    return run


def _listen(handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set them; returns those before."""
    try:
        return {one: signal.signal(one, handler) for one, handler in handlers.items()}
    except ValueError:  # not in the main thread, where signals are nobody's business
        return {}


class Terminated(KeyboardInterrupt):
    """A signal by which others end a process, taken as Ctrl-C."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """A handler of signals that end a command."""
    raise Terminated(number) if number in ENDING else KeyboardInterrupt


@contextmanager
def importing() -> Iterator[None]:
    """Inside, where modules are imported and nothing has begun that would have to be put right, Ctrl-C and SIGTERM end
    the process at once: modules that are being imported turn exceptions into errors of their own."""
    with ExitStack() as after:
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: somebody else's, not of Python
                with suppress(ValueError):  # not in the main thread
                    after.callback(signal.signal, number, signal.signal(number, _stop))
        yield


def _stop(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    os._exit(128 + number)


def _failure(message: str) -> None:
    from tapestream.cli import show  # which takes time to import that help and completion do not have

    show.failure(message)
