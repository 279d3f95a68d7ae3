"""`LateState`: an optimizer's state that is shown when somebody looks at it, and its updates have ended."""

import sys
from collections.abc import Callable
from typing import Any


class LateState:
    """What an optimizer says of ``state`` where updates go on after their step."""

    _unshown = False
    _state_shown: Any
    _showing: Any
    settle: Callable[[], None]  # waits for them
    _show_state: Callable[[], None]

    @property
    def state(self) -> Any:
        """As torch's. Who looks at it waits for updates that go on."""
        if self._unshown:
            self.settle()
            self._unshown = False
            self._show_state()
        return self._state_shown

    @state.setter
    def state(self, state: Any) -> None:
        self._state_shown = state

    def _hide_state(self) -> None:
        """Until somebody looks: nobody is to have views of what updates write that go on after their step."""
        if sys.getrefcount(self._state_shown) <= _ALONE:  # else somebody has the dict, and is not to find it empty
            self._state_shown.clear()
            self._showing.forget()
        self._unshown = True


_ALONE = 2  # the attribute, and the argument
