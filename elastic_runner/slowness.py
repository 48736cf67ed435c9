"""Notices a rank that its peers wait for: its own work of each step beside theirs, never its waiting. No clock, no processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ..progress import Progress

STEPS = 20
"""Fewer steps say nothing."""
SECONDS = 10.0
SHARE = 0.1
"""A rank is slow if it works this much of the time longer than the middle one of its peers…"""
FACTOR = 1.3
"""…and this many times as long."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """What was seen: seconds of own work in each step, of the rank and of the middle one of its peers."""

    rank: int
    steps: int
    seconds: float
    own_s: float
    peers_s: float

    @property
    def text(self) -> str:
        """For people."""
        work = f"{self.own_s:.3g} s of its own work in each step, {self.peers_s:.3g} s of theirs"
        return f"rank {self.rank} is slow, and its peers wait for it: {work}"


class SlowWatch:
    """Looks at the ranks' pages over windows of at least STEPS steps and SECONDS seconds."""

    def __init__(self) -> None:
        self._begin: tuple[float, Mapping[int, Progress]] | None = None

    def look(self, now: float, pages: Mapping[int, Progress]) -> Slow | None:
        """Who was slow in the window that ends now; None while it is too short, or nobody was."""
        if len(pages) < 2 or not all(p.steps_done for p in pages.values()):
            return None
        if self._begin is None or self._begin[1].keys() != pages.keys():
            self._begin = now, pages
            return None
        since, before = self._begin
        steps = min(p.steps_done - before[r].steps_done for r, p in pages.items())
        if now - since < SECONDS or steps < STEPS:
            return None
        self._begin = now, pages
        own = {r: (p.own_s - before[r].own_s) / steps for r, p in pages.items()}
        rank = max(own, key=own.__getitem__)
        peers = statistics.median(s for r, s in own.items() if r != rank)
        if own[rank] < FACTOR * peers or (own[rank] - peers) * steps < SHARE * (now - since):
            return None
        return Slow(rank=rank, steps=steps, seconds=now - since, own_s=own[rank], peers_s=peers)
