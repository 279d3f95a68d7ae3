"""Least forwards in closed form: the table beside the single numbers."""

from tapestream.planners._recurrences import least_forwards, least_forwards_to


def test_the_table_holds_the_single_numbers():
    for slots in (1, 2, 3, 7, 400):
        for longest in (1, 2, 3, 50, 331):
            expected = [least_forwards(n, slots) for n in range(1, longest + 1)]
            assert least_forwards_to(longest, slots).tolist() == expected
