"""Bytes and seconds as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestream.errors import InputError
from tapestream.units import format_nbytes, format_seconds, parse_flops, parse_nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"), (0.0123, "12.3 ms"), (9.9996e-4, "1 ms"), (0.9997, "1 s"), (59.94, "59.9 s"), (59.97, "1 min 0 s"),
        (75, "1 min 15 s"), (119.4, "1 min 59 s"), (119.7, "2 min 0 s"), (3599.6, "60 min 0 s"),
        (35999.6, "600 min 0 s"), (36000, "10 h 0 min"), (172799, "48 h 0 min"), (3e5, "3 days 11 h"),
        (1.686e11, "5,346.3 years"),
    ],
)  # fmt: skip
def test_seconds_carry_over(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 6e7))
def test_seconds_can_be_read_back(seconds: float) -> None:
    words = format_seconds(seconds).split()
    units = {"days": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
    parts = [(float(number), unit) for number, unit in zip(words[::2], words[1::2], strict=True)]
    assert sum(number * units[unit] for number, unit in parts) == pytest.approx(seconds, rel=0.01)
    assert all(number < (60 if unit == "s" else 1000) or unit == "min" for number, unit in parts)


@pytest.mark.parametrize("text", ["60T", "60TFLOP/s", "60 TFLOP/s", "60tflops", "6e13", "60e12", "60000G", "0.06P"])
def test_flops_are_read_as_people_write_them(text: str) -> None:
    assert parse_flops(text) == pytest.approx(6e13)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e999", "", "T", "1.2.3", "60X"])
def test_what_is_no_flops_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="60TFLOP/s"):
        parse_flops(text)


@given(st.integers(0, 2**50))
def test_bytes_can_be_read_back(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.01)
