"""crc32 of a whole from the crc32 of its parts, so that every byte is read once whatever is checked."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: crc32 keeps its bits reversed


def combine(first: int, second: int, second_length: int) -> int:
    """The crc32 of two byte strings put together, given the crc32 of each and the length of the second."""
    return _times(_shift(second_length), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo crc32's."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x to the power of 8 × length, modulo crc32's polynomial: what `length` more bytes do to a crc."""
    result, power = _ONE, _ONE >> 8
    while length:
        if length & 1:
            result = _times(power, result)
        power = _times(power, power)
        length >>= 1
    return result
