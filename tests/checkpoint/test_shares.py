"""The arithmetic under a checkpoint, over many random cases: who copies what, and checksums of parts."""

from __future__ import annotations

import math
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from goodrun.checkpoint.boxes import Box, Piece, cut_small, share
from goodrun.checkpoint.crc import combine

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)


def elements(pieces: list[Piece]) -> list[tuple[str, tuple[int, ...]]]:
    """Every element that the pieces cover."""
    found = []
    for p in pieces:
        for i in range(p.box.count):
            at, rest = [], i
            for size, offset in zip(reversed(p.box.size), reversed(p.box.offset), strict=True):
                at.append(offset + rest % size)
                rest //= size
            found.append((p.name, tuple(reversed(at))))
    return sorted(found)


@given(shapes, st.integers(1, 6), st.integers(1, 64))
@settings(deadline=None)
def test_every_element_once(tensors: list[tuple[int, ...]], holders: int, largest: int) -> None:
    """However a state is shared out and cut small, every element is copied by exactly one rank; empty and 0-dim tensors have a home too."""
    whole = [Piece(f"t{i}", Box((0,) * len(size), size), 4) for i, size in enumerate(tensors)]
    shares = [cut_small(s, largest) for s in share(whole, holders)]
    together = [p for s in shares for p in s]
    assert elements(together) == elements(whole)
    assert {p.name for p in together} == {p.name for p in whole}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 8))
@settings(deadline=None)
def test_shares_are_even(rows: list[int], holders: int) -> None:
    """No rank has more than its part and a row."""
    whole = [Piece(f"t{i}", Box((0, 0), (n, 5)), 4) for i, n in enumerate(rows)]
    total = sum(p.nbytes for p in whole)
    for part in share(whole, holders):
        assert abs(sum(p.nbytes for p in part) - total / holders) <= 20 + 1


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3), st.data())
@settings(deadline=None)
def test_common_part(first: list[tuple[int, int]], data: st.DataObject) -> None:
    """What two boxes share is what lies in both."""
    second = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=len(first), max_size=len(first)))
    a, b = (Box(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in (first, second))
    found = a.common(b)
    both = [range(max(p, q), min(p + m, q + n)) for (p, m), (q, n) in zip(first, second, strict=True)]
    assert (0 if found is None else found.count) == math.prod(len(r) for r in both)


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(deadline=None)
def test_checksum_of_a_whole_from_its_parts(first: bytes, second: bytes) -> None:
    """combine() is zlib's own answer for the two together."""
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
