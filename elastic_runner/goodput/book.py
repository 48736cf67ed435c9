"""The book of a run: pieces of time, each with what its slots did. Whole microseconds, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .buckets import Bucket

FINE_US = 900_000_000
"""This long the pieces are kept as they came."""
_PIECE_US = 60_000_000
"""Older pieces of training are put together up to this length: a record of months stays small."""


class Piece(NamedTuple):
    """What all slots did from `begin` to `end`, microseconds since the run began.

    `spent` is in slot-microseconds of the active slots and sums to their number times the length; idle slots idle throughout.
    """

    begin: int
    end: int
    active: tuple[int, ...]
    idle: tuple[int, ...]
    asked: int
    """How many slots the job had asked for."""
    spent: Mapping[Bucket, int]
    steps: tuple[int, int] | None = None
    """The steps after the first number up to the second were done in this piece; None where none were, or cannot be told."""
    attempt: int = -1

    @property
    def length(self) -> int:
        """In microseconds."""
        return self.end - self.begin

    def split(self, at: int) -> tuple[Piece, Piece]:
        """Cut in two at `at`; what was spent is shared out by length, and nothing is lost to rounding."""
        part, whole = at - self.begin, self.length
        left: dict[Bucket, int] = {}
        right: dict[Bucket, int] = {}
        before = 0
        for bucket, amount in self.spent.items():  # cumulative rounding: the parts sum to exactly the slots' time
            left[bucket] = (before + amount) * part // whole - before * part // whole
            right[bucket] = amount - left[bucket]
            before += amount
        middle = None
        if self.steps is not None:
            middle = self.steps[0] + (self.steps[1] - self.steps[0]) * part // whole
        first = self._replace(end=at, spent=left, steps=None if self.steps is None or middle is None else (self.steps[0], middle))
        return first, self._replace(begin=at, spent=right, steps=None if self.steps is None or middle is None else (middle, self.steps[1]))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over pieces: slot-microseconds by bucket, microseconds of the clock, and slot-microseconds asked for."""

    spent: dict[Bucket, int]
    wall: int = 0
    asked: int = 0
    productive: float = 0.0
    """Microseconds of the clock that were productive: of each piece the share of its active slots."""


@dataclass(kw_only=True)
class Book:
    """The pieces so far, in order of time and without overlap."""

    pieces: list[Piece] = field(default_factory=list)
    _compacted: int = 0

    def add(self, piece: Piece) -> None:
        """Append what came after all that is booked."""
        if piece.length <= 0:
            return
        self.pieces.append(piece)
        self._compact()

    def _compact(self) -> None:
        """Put old pieces together; the newest stay as they are, for the last minutes are looked at by themselves."""
        self._compacted = min(self._compacted, len(self.pieces) - 1)
        while self._compacted + 1 < len(self.pieces) and self.pieces[self._compacted + 1].end <= self.pieces[-1].end - FINE_US:
            last, piece = self.pieces[self._compacted : self._compacted + 2]
            if not _continues(last, piece):
                self._compacted += 1
                continue
            spent = dict(last.spent)
            for bucket, amount in piece.spent.items():
                spent[bucket] = spent.get(bucket, 0) + amount
            steps = (last.steps[0], piece.steps[1]) if last.steps and piece.steps else None
            self.pieces[self._compacted] = last._replace(end=piece.end, spent=spent, steps=steps)
            del self.pieces[self._compacted + 1]

    def take_back(self, at: int) -> None:
        """Forget everything after `at`: it will be booked anew."""
        while self.pieces and self.pieces[-1].begin >= at:
            self.pieces.pop()
        if self.pieces and self.pieces[-1].end > at:
            self.pieces.append(self.pieces.pop().split(at)[0])

    def redo(self, step: int) -> None:
        """The steps after `step` were taken back: what was productive in them has been for nothing."""
        i = len(self.pieces)
        while i:
            i -= 1
            piece = self.pieces[i]
            if piece.steps is None:
                continue
            after, upto = piece.steps
            if upto <= step:
                return
            if after < step:
                cut = piece.begin + piece.length * (step - after) // (upto - after)
                kept, piece = piece.split(min(max(cut, piece.begin + 1), piece.end - 1)) if piece.length > 1 else (None, piece)
                if kept is not None:
                    self.pieces.insert(i, kept._replace(steps=(after, step)))
                    i += 1
            self.pieces[i] = piece._replace(spent=_moved(piece.spent, Bucket.PRODUCTIVE, Bucket.REDONE), steps=None)
            if after < step:
                return

    def forget_steps(self) -> None:
        """Later steps will be counted anew: those booked so far can no longer be told from them."""
        self.pieces = [p if p.steps is None else p._replace(steps=None) for p in self.pieces]

    def since(self, begin: int) -> Iterator[Piece]:
        """The pieces from `begin` on, newest first; the one that straddles it is cut."""
        for piece in reversed(self.pieces):
            if piece.end <= begin:
                return
            yield piece.split(begin)[1] if piece.begin < begin else piece

    def totals(self, begin: int | None = None) -> Totals:
        """What was spent, in all or from `begin` on."""
        spent: dict[Bucket, int] = dict.fromkeys(Bucket, 0)
        wall = asked = 0
        productive = 0.0
        for piece in self.pieces if begin is None else self.since(begin):
            for bucket, amount in piece.spent.items():
                spent[bucket] += amount
            spent[Bucket.IDLE] += piece.length * len(piece.idle)
            wall += piece.length
            asked += piece.length * piece.asked
            if piece.active:
                productive += piece.spent.get(Bucket.PRODUCTIVE, 0) / len(piece.active)
        return Totals(spent=spent, wall=wall, asked=asked, productive=productive)


def _continues(last: Piece, piece: Piece) -> bool:
    if last.end != piece.begin or piece.end - last.begin > _PIECE_US or last.attempt != piece.attempt or last.asked != piece.asked:
        return False
    if last.active != piece.active or last.idle != piece.idle:
        return False
    if last.steps is None and piece.steps is None:
        return last.spent.keys() == piece.spent.keys() and len(last.spent) == 1
    return last.steps is not None and piece.steps is not None and last.steps[1] == piece.steps[0]


def _moved(spent: Mapping[Bucket, int], source: Bucket, target: Bucket) -> dict[Bucket, int]:
    moved = dict(spent)
    moved[target] = moved.get(target, 0) + moved.pop(source, 0)
    return moved
