"""Which rank the others wait for: a fold over how long each works by itself before it meets them."""

from __future__ import annotations

import statistics

from ..events import AttemptStarted, Event, RankProgress

_STEPS = 20
"""Fewer steps say nothing."""
_WORTH_IT = 0.1
"""A rank lags if it works this much of the time longer than its peers."""


class Stragglers:
    """Adds up by how much the slowest rank of this node lagged behind the middle one.

    What a rank does alone in a step, from having its data to its backward pass, is timed in the rank; from there on ranks wait for each
    other. So the rank that takes longest there holds up all, and how much could be won is its lag behind its peers.
    """

    def __init__(self) -> None:
        self.lag_s: dict[int, float] = {}
        """Seconds by which each local rank held the others up."""
        self.ranks = 0
        self._before: RankProgress | None = None
        self._spans: dict[int, tuple[int, float]] = {}

    def add(self, e: Event) -> None:
        """Take one event."""
        if isinstance(e, AttemptStarted):
            self._before = None
        elif isinstance(e, RankProgress):
            before, self._before = self._before, e
            if before is not None and len(before.own_s) == len(e.own_s) > 1 and min(before.steps, default=0) > 0:
                self._compare(before, e)

    def worst(self) -> tuple[int, float] | None:
        """The local rank that held the others up most, and the seconds; None where none lagged enough to say so."""
        told = {r: lag for r, lag in self.lag_s.items() if self._spans[r][0] >= _STEPS and lag >= _WORTH_IT * self._spans[r][1]}
        return max(told.items(), key=lambda item: item[1]) if told else None

    def _compare(self, before: RankProgress, e: RankProgress) -> None:
        steps = min(e.steps) - min(before.steps)
        if steps <= 0 or max(e.steps) - min(e.steps) > 1:
            return
        own = [now - then for now, then in zip(e.own_s, before.own_s, strict=True)]
        rank = max(range(len(own)), key=own.__getitem__)
        lag = own[rank] - statistics.median(own[:rank] + own[rank + 1 :])
        self.ranks = len(own)
        self.lag_s[rank] = self.lag_s.get(rank, 0.0) + max(lag, 0.0)
        for r in range(len(own)):
            n, seconds = self._spans.get(r, (0, 0.0))
            self._spans[r] = (n + steps, seconds + max(e.t - before.t, 0.0))
