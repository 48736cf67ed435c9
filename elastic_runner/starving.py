"""Notices a rank whose data loader cannot keep up, and says what would help as far as that was measured. No clock, no processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..progress import Progress

STEPS = 20
"""Fewer steps say nothing: a loader may be slow at first, or between two epochs."""
SECONDS = 10.0
SHARE = 0.25
"""A rank that waits for its data this much of the time starves."""


@dataclass(frozen=True, kw_only=True)
class Starving:
    """What was seen of the rank that waits most. `workers` is the loader's own number, -1 if unknown; `enough` 0 where nothing tells."""

    rank: int
    steps: int
    seconds: float
    waited_s: float
    workers: int
    enough: int
    text: str


class StarvingWatch:
    """Looks at the ranks' pages over windows of at least STEPS steps and SECONDS seconds; speaks once in an attempt."""

    def __init__(self, cores: int) -> None:
        """`cores` is how many this process and its ranks may use."""
        self._cores = cores
        self._spoken = False
        self._begin: tuple[float, Mapping[int, Progress]] | None = None

    def look(self, now: float, pages: Mapping[int, Progress]) -> Starving | None:
        """What these pages, read at `now`, show; None while nobody starves or too little was seen."""
        if self._spoken or not all(p.steps_done for p in pages.values()):
            return None
        if self._begin is None or self._begin[1].keys() != pages.keys():
            self._begin = (now, pages)
            return None
        since, before = self._begin
        steps = min(p.steps_done - before[r].steps_done for r, p in pages.items())
        if now - since < SECONDS or steps < STEPS:
            return None
        self._begin = (now, pages)
        rank = max(pages, key=lambda r: pages[r].data_wait_s - before[r].data_wait_s)
        waited = pages[rank].data_wait_s - before[rank].data_wait_s
        if waited < SHARE * (now - since):
            return None
        self._spoken = True
        return _told(rank, steps, now - since, waited, pages[rank].workers, max(self._cores // len(pages), 1))


def _told(rank: int, steps: int, seconds: float, waited: float, workers: int, cores: int) -> Starving:
    wait, work = waited / steps, max((seconds - waited) / steps, 1e-6)
    text = f"rank {rank} waits for data {100 * waited / seconds:.0f} % of the time: of each step {wait:.3g} s, against {work:.3g} s of work"
    # one batch takes this long to load: with workers a batch comes every wait + work seconds from that many at once
    load = wait if workers == 0 else workers * (wait + work)
    enough = math.ceil(load / work) if workers >= 0 else 0
    if workers == 0:
        text += "; its loader has no workers"
    elif workers > 0:
        text += f"; its loader has {workers} worker{'s' if workers > 1 else ''}"
    if enough and enough <= cores:
        text += f": num_workers={enough} would keep up"
    elif enough:
        text += f": to keep up takes {enough}, and there are {cores} cores for each rank, so loading a batch has to become cheaper"
    return Starving(rank=rank, steps=steps, seconds=seconds, waited_s=waited, workers=workers, enough=enough, text=text)
