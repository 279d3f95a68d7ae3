"""`Marks`: a set of integers that costs memory per run of consecutive members, not per member."""

from bisect import bisect_left, bisect_right
from typing import TypeAlias

Cut: TypeAlias = tuple[int, tuple[int, ...]]


class Marks:
    """The sorted integers at which membership flips, so that 0..9_999_999 is ``[0, 10_000_000]``."""

    __slots__ = ("flips",)

    def __init__(self) -> None:
        self.flips: list[int] = []

    def __contains__(self, k: int) -> bool:
        return bisect_right(self.flips, k) & 1 == 1

    def __bool__(self) -> bool:
        return bool(self.flips)

    def flip(self, k: int) -> None:
        """Put ``k`` in if it is out, out if it is in."""
        for at in (k, k + 1):
            i = bisect_left(self.flips, at)
            if i < len(self.flips) and self.flips[i] == at:
                del self.flips[i]
            else:
                self.flips.insert(i, at)

    def cut(self, low: int, high: int) -> Cut:
        """Membership within ``low <= k < high``, relative to ``low``: that of ``low`` and the flips after it."""
        first, last = bisect_right(self.flips, low), bisect_left(self.flips, high)
        return first & 1, tuple([at - low for at in self.flips[first:last]])

    def paste(self, low: int, high: int, cut: Cut) -> None:
        """Make membership within ``low <= k < high`` what ``cut`` says; outside it stays."""
        inside, flips = cut
        first, last = bisect_left(self.flips, low), bisect_right(self.flips, high)
        fresh = [low + at for at in flips]
        if inside != first & 1:
            fresh.insert(0, low)
        if (inside + len(flips)) & 1 != last & 1:
            fresh.append(high)
        self.flips[first:last] = fresh
