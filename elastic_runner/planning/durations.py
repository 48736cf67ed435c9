"""Lengths of time as people write them: 90s, 30m, 2h, 5d."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds; a bare number is seconds. Raises ValueError, in words, for what is not a length of time."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or (found[2] and found[2] not in _UNITS):
        raise ValueError(f"{text!r} is no length of time: write 90s, 30m, 2h or 5d")
    return float(found[1]) * _UNITS.get(found[2], 1.0)


def show_duration(seconds: float) -> str:
    """Two or three digits in the unit that fits."""
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        # 36 h says more than 1.5 d, and 90 min more than 1.5 h
        if seconds >= {"d": 3 * size, "h": 1.5 * size, "min": 2 * size}[unit]:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
