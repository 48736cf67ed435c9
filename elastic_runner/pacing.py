"""Tells what holds the ranks of an attempt up: a loader that does not keep up, a rank that its peers wait for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ..progress import Progress
from .events import DataStarved, RankSlow
from .journal import Journal
from .slowness import SlowWatch
from .starving import StarvingWatch


class Pacing:
    """Watches one attempt at a time; `begins` starts it afresh."""

    def __init__(self, journal: Journal, say: Callable[[str], None]) -> None:
        self.device_of: Callable[[int, float], str] = lambda slot, for_s: ""
        """Told that the rank on a slot was slow for so long; says what its device says of itself."""
        self._journal, self._say = journal, say
        self.begins()

    def begins(self) -> None:
        """A new attempt's ranks exist."""
        self._starving, self._slow = StarvingWatch(len(os.sched_getaffinity(0))), SlowWatch()
        self._said_slow = set[int]()

    def look(self, pages: Mapping[int, Progress], slots: Mapping[int, int]) -> None:
        """Say and write what is new. `pages` and `slots` are by rank."""
        self._starved(pages)
        self._slowest(pages, slots)

    def _starved(self, pages: Mapping[int, Progress]) -> None:
        seen = self._starving.look(self._journal.clock(), pages)
        if seen is not None:
            self._say(seen.text)
            self._journal.write(
                DataStarved(
                    rank=seen.rank,
                    steps=seen.steps,
                    over_s=round(seen.seconds, 3),
                    waited_s=round(seen.waited_s, 3),
                    workers=seen.workers,
                    enough=seen.enough,
                    text=seen.text,
                )
            )

    def _slowest(self, pages: Mapping[int, Progress], slots: Mapping[int, int]) -> None:
        seen = self._slow.look(self._journal.clock(), pages)
        if seen is None:
            return
        device = self.device_of(slots[seen.rank], seen.seconds)
        self._journal.write(
            RankSlow(
                rank=seen.rank,
                slot=slots[seen.rank],
                steps=seen.steps,
                over_s=round(seen.seconds, 3),
                own_s=round(seen.own_s, 6),
                peers_s=round(seen.peers_s, 6),
                device=device,
            )
        )
        if seen.rank not in self._said_slow:
            self._said_slow.add(seen.rank)
            self._say(seen.text + (f" ({device})" if device else ""))
