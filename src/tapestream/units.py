"""Bytes, rates and durations between text and numbers."""

import re

from tapestream.errors import InputError

_FACTOR = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
DAY = 86400
"""Seconds."""
_YEAR = 365 * DAY
_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Bytes from ``"2.5 GiB"``, ``"25GB"``, ``"1048576"`` or an int.

    GiB is 2**30, GB is 10**9. Raises InputError on anything else, negative numbers included.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise InputError(f"a size in bytes is an int or text such as '8GiB', not {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise InputError(f"a size in bytes cannot be negative: {text}")
        return text
    match = _PATTERN.fullmatch(text)
    factor = _FACTOR.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InputError(
            f"cannot read {text!r} as a size in bytes; write a number and a unit "
            "(B, kB, MB, GB, TB or KiB, MiB, GiB, TiB), for example '8GiB'"
        )
    return round(float(match[1].replace("_", "")) * factor)


def parse_rate(text: str | float | int) -> float:
    """Bytes per second from ``"25GB/s"`` (the ``/s`` may be left out) or a number."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not text > 0:
            raise InputError(f"a rate in bytes per second must be positive, not {text!r}")
        return float(text)
    if not isinstance(text, str):
        raise InputError(f"a rate is a number of bytes per second or text such as '25GB/s', not {text!r}")
    value = parse_nbytes(re.sub(r"/\s*s(ec)?\s*$", "", text))
    if value == 0:
        raise InputError(f"a rate in bytes per second must be positive, not {text!r}")
    return float(value)


_FLOPS = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kMGTP]?)\s*(?:FLOPs?(?:/s)?)?\s*", re.IGNORECASE)
_SI = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def parse_flops(text: str) -> float:
    """FLOP/s from ``"60T"``, ``"60 TFLOP/s"`` or ``"6e13"``. Raises InputError on anything else, zero included."""
    match = _FLOPS.fullmatch(text)
    try:
        value = float(match[1]) * _SI[match[2].lower()] if match else 0.0
    except ValueError:  # "1.2.3"
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"cannot read {text!r} as FLOP/s; write a positive number, such as 60T, 60TFLOP/s or 6e13")
    return value


def format_nbytes(nbytes: int | float) -> str:
    """``1536 -> "1.5 KiB"``: three significant digits, binary units, for people to read."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """``0.0123 -> "12.3 ms"``, ``75 -> "1 min 15 s"``; from ten hours on ``"12 h 5 min"``, then days, then years."""
    if seconds > 2 * _YEAR:
        return f"{seconds / _YEAR:,.1f} years"
    if seconds > 2 * DAY:
        return "{} days {} h".format(*divmod(round(seconds / 3600), 24))
    if seconds >= 36000:
        return "{} h {} min".format(*divmod(round(seconds / 60), 60))
    if float(f"{seconds:.3g}") >= 60:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        # What is printed decides on the unit: 0.9997 s are not "1e+03 ms".
        if float(text := f"{seconds * factor:.3g}") >= 1 or unit == "us":
            return f"{text} {unit}"
    raise AssertionError("unreachable")
