"""What ranks waited for, and what of it is not booked yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .. import events as ev
from .buckets import Bucket

_FAR_US = 10**16  # three hundred years: a number that is no time


@dataclass(kw_only=True)
class Waits:
    """What the ranks have waited since their attempt began, and what of it is not booked yet (microseconds of slots)."""

    seen: dict[Bucket, tuple[float, ...]] = field(default_factory=dict)
    owed: dict[Bucket, int] = field(default_factory=dict)

    def told(self, e: ev.RankProgress, *, book: bool) -> None:
        """Take the ranks' totals; the increase is owed where `book` is set, else it belongs to the start.

        Ranks in lockstep are all held up by the one that waits longest, so that each is charged with its wait.
        """
        lockstep = len(e.steps) > 1 and max(e.steps) - min(e.steps) <= 1
        for bucket, totals in ((Bucket.DATA_WAIT, e.data_wait_s), (Bucket.SAVE_STALL, e.save_stall_s), (Bucket.EVAL, e.eval_s)):
            before = self.seen.get(bucket, ())
            if book and totals != before:
                more = [max(microseconds(now - (before[i] if i < len(before) else 0.0)), 0) for i, now in enumerate(totals)]
                self.owed[bucket] = self.owed.get(bucket, 0) + (max(more, default=0) * len(more) if lockstep else sum(more))
            self.seen[bucket] = totals

    def carve(self, room: int, *, keep: bool = False) -> dict[Bucket, int]:
        """Take what is owed out of `room` slot-microseconds, as far as it goes; the rest stays owed, all of it where `keep` is set."""
        taken: dict[Bucket, int] = {}
        for bucket, owed in self.owed.items():
            if owed > 0 and (part := min(owed, room)) > 0:
                taken[bucket] = part
                room -= part
                if not keep:
                    self.owed[bucket] -= part
        return taken


def microseconds(seconds: float) -> int:
    """Whole microseconds; 0 for what is no time at all."""
    if not math.isfinite(seconds) or abs(seconds) * 1e6 > _FAR_US:
        return 0
    return round(seconds * 1e6)
