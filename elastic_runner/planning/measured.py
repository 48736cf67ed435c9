"""What failures and checkpoints cost in a run that was recorded."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from ..events import Event, RankProgress
from ..history import fold
from .yields import Costs


def costs_of(events: Iterable[Event], otherwise: Costs) -> tuple[Costs, str]:
    """The run's mean costs, for it is the mean that adds up, and in words which they are; the rest is taken from `otherwise`."""
    told = list(events)
    back = [a.recovery for a in fold(told).attempts if a.recovery is not None and a.recovery.finished]
    costs, words = otherwise, []
    if back:
        detect = statistics.fmean(p.detect for p in back)
        costs = replace(costs, detect_s=detect, recover_s=statistics.fmean(p.total - p.detect for p in back))
        words.append(f"detection and recovery measured in {len(back)} restart{'s' if len(back) > 1 else ''}")
    else:
        words.append("detection and recovery assumed, for the run came back from no failure")
    stall = _stall_s(told)
    if stall is not None:
        costs = replace(costs, stall_s=stall)
        words.append("stall measured")
    else:
        words.append("stall assumed")
    return costs, ", ".join([*words, "time to durable assumed"])


def _stall_s(events: list[Event]) -> float | None:
    """Seconds that training stood still for one checkpoint, on the mean; None where no attempt tells of two."""
    stalled, taken = 0.0, 0
    attempts: dict[tuple[str, int], list[RankProgress]] = {}
    for e in events:
        if isinstance(e, RankProgress):
            attempts.setdefault((e.node, e.attempt), []).append(e)
    for beats in attempts.values():
        checkpoints = len({e.durable_step for e in beats if e.durable_step >= 0})
        if checkpoints and any(e.save_stall_s for e in beats):
            stalled += max(max(e.save_stall_s, default=0.0) for e in beats)
            taken += checkpoints
    return stalled / taken if taken else None
