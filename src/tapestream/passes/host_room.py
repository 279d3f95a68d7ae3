"""`HostRoom`: bytes of the host while a schedule is being issued."""

from tapestream.errors import BudgetError
from tapestream.passes.memory import Nbytes


class HostRoom:
    """``living``: bytes of values that have a place there; ``beside``: what states and saved tensors take, action by
    action; ``limit``: the most that is allowed; ``reserve``: kept free by what comes in early, for a value on its way
    out. ``most``: bytes so far."""

    __slots__ = ("_beside", "_limit", "_living", "_reserve", "_staged", "most")

    def __init__(self, living: int, beside: Nbytes, limit: float, reserve: int) -> None:
        self._living, self._limit, self._reserve = living, limit, reserve
        self._beside = beside if beside.any() else None
        self._staged = 0  # values that only pass through
        self.most = living + int(beside.max(initial=0))

    def take(self, nbytes: int, position: int) -> None:
        """So many bytes more pass through, during the action at ``position``."""
        self._staged += nbytes
        self.most = max(self.most, self._held(position))

    def give(self, nbytes: int) -> None:
        """They have left."""
        self._staged -= nbytes

    def lacks(self, nbytes: int, position: int) -> bool:
        """Whether so many do not fit now."""
        return self._held(position) + nbytes > self._limit

    def allows(self, nbytes: int, position: int, until: int, reserve: int = 0) -> bool:
        """Whether so many may come early, for the action at ``until``; ``reserve``: what else is kept free."""
        beside = 0 if self._beside is None else int(self._beside[position : until + 1].max())
        return self._living + beside + self._staged + nbytes + self._reserve + reserve <= self._limit

    def check(self, allowed: int | None) -> None:
        """Raise BudgetError where it was more than ``allowed``."""
        if allowed is not None and self.most > allowed:
            raise BudgetError(
                f"blocks and what passes through take {self.most} bytes of HOST, {allowed} are allowed; allow that much"
            )

    def _held(self, position: int) -> int:
        beside = 0 if self._beside is None else int(self._beside[position])
        return self._living + beside + self._staged
