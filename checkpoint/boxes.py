"""Rectangular parts of tensors, and how those that several ranks hold alike are shared out among them, even by bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST_PIECE = 64 << 20
"""A piece is checked as a whole when a part of it is read at another world size, so it must not be huge."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how far it goes, per dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)

    def rows(self, begin: int, end: int) -> Box:
        """The part from row `begin` to row `end` of its own first dimension."""
        return Box((self.offset[0] + begin, *self.offset[1:]), (end - begin, *self.size[1:]))

    def common(self, other: Box) -> Box | None:
        """What two boxes of one tensor share; None if that is nothing."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name`, whose elements have `width` bytes."""

    name: str
    box: Box
    width: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.box.count * self.width


def share(pieces: Sequence[Piece], holders: int) -> list[list[Piece]]:
    """Cut what `holders` ranks hold alike into one list for each, so that all have the same number of bytes but for a row.

    Pieces are cut along their first dimension only, which every reader of torch's format puts together again.
    """
    shares: list[list[Piece]] = [[] for _ in range(holders)]
    total, passed = sum(p.nbytes for p in pieces), 0
    for piece in pieces:
        if not piece.box.size or piece.nbytes == 0:
            shares[min(passed * holders // max(total, 1), holders - 1)].append(piece)
            passed += piece.nbytes
            continue
        rows = piece.box.size[0]
        row = piece.nbytes // rows
        begin = 0
        for holder in range(holders):
            limit = total * (holder + 1) // holders - passed  # where this holder's bytes end, counted from the piece's first
            end = rows if holder == holders - 1 else min(max((limit + row // 2) // row, begin), rows)
            if end > begin:
                shares[holder].append(Piece(piece.name, piece.box.rows(begin, end), piece.width))
            begin = end
        passed += piece.nbytes
    return shares


def cut_small(pieces: Iterable[Piece], largest: int = LARGEST_PIECE) -> list[Piece]:
    """The same pieces, none larger than `largest` bytes unless a single row is."""
    small = []
    for piece in pieces:
        if not piece.box.size or piece.nbytes <= largest:
            small.append(piece)
            continue
        rows = piece.box.size[0]
        step = max(1, largest * rows // piece.nbytes)
        small += [Piece(piece.name, piece.box.rows(i, min(i + step, rows)), piece.width) for i in range(0, rows, step)]
    return small
