"""Objective A of `least_peak` as its formula says it, every stage after every other: the readable version."""

from tapestream.planners._least_peak import Cuts, Sizes


def least_peak(sizes: Sizes) -> int:
    """a_0 + M(0), M(j) = min(last(j), min over j < k < n of max(I(j, k), a_k + M(k)))."""
    n = len(sizes.last)
    rest = [0] * n  # a_k + M(k)
    for j in range(n - 1, -1, -1):
        choices = [max(max(sizes.reached[j:k]) - sizes.tape[j], rest[k]) for k in range(j + 1, n)]
        rest[j] = sizes.states[j] + min([sizes.last[j], *choices])
    return rest[0]


def peak(sizes: Sizes, cuts: Cuts) -> int:
    """The same bytes for one choice of restart checkpoints."""
    n, held, most = len(sizes.last), 0, 0
    starts = [0, *cuts.checkpoints]
    for start, stop in zip(starts, [*cuts.checkpoints, n], strict=True):
        held += sizes.states[start]
        inside = sizes.last[start] if stop == n else max(sizes.reached[start:stop]) - sizes.tape[start]
        most = max(most, held + inside)
    return most
