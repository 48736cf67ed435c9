"""What is known of every agent's record: its lines, passed on from agent to agent until all have them. Pure: no socket, no file."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

_PROGRESS_KEPT = 256
"""Of each agent; of more, every second one is dropped: what lies between two is told less finely, and not lost."""


class Line(NamedTuple):
    """One event of an agent's record as JSON. Its agent counts upwards, and may leave numbers out."""

    agent: str
    n: int
    text: str
    progress: bool = False
    """Whether the next of its kind tells all that this one does."""


@dataclass(kw_only=True)
class Reader:
    """Somebody to whom the tale is told: how far, and what it had before."""

    at: int = 0
    had: dict[str, int] = field(default_factory=dict)


class Tale:
    """Lines in the order in which they came here."""

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        """The number of the newest line of each agent."""
        self._serials: list[int] = []
        self._lines: list[Line] = []
        self._count = 0
        self._progress: dict[str, int] = {}

    def add(self, line: Line) -> bool:
        """Take one line; False if it was known."""
        if line.n <= self.newest.get(line.agent, -1):
            return False
        self.newest[line.agent] = line.n
        self._count += 1
        self._serials.append(self._count)
        self._lines.append(line)
        if line.progress:
            self._progress[line.agent] = self._progress.get(line.agent, 0) + 1
            if self._progress[line.agent] > _PROGRESS_KEPT:
                self._thin(line.agent)
        return True

    def is_news_for(self, reader: Reader) -> bool:
        """Whether anything has come since `reader` was told the last."""
        return reader.at < self._count

    def tell(self, reader: Reader, room: int) -> list[Line]:
        """What `reader` is to be told next: at most `room` bytes, but one line at least, if there is any."""
        told: list[Line] = []
        for i in range(bisect_right(self._serials, reader.at), len(self._lines)):
            line = self._lines[i]
            if line.n > reader.had.get(line.agent, -1):
                room -= len(line.text)
                if told and room < 0:
                    return told
                told.append(line)
            reader.at = self._serials[i]
        reader.at = self._count
        return told

    def _thin(self, agent: str) -> None:
        keep, odd = [], False
        for i, line in enumerate(self._lines):
            if line.progress and line.agent == agent:
                odd = not odd
                if odd and line.n != self.newest[agent]:
                    self._progress[agent] -= 1
                    continue
            keep.append(i)
        self._serials = [self._serials[i] for i in keep]
        self._lines = [self._lines[i] for i in keep]
