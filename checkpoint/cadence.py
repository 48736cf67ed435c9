"""How often to save: in steps, in seconds, or where the time lost to saving and to redoing is least. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from dataclasses import dataclass, field

MOST_SPENT = 0.01
"""Of the time, at most this part goes into saving."""
FAILURES_PER_DEVICE_YEAR = 0.17
"""What large runs have published; a run's own faults soon outweigh it."""
_YEAR_S = 365 * 24 * 3600.0
_BELIEVED_S = 3600.0
"""What is published counts as much as an hour of this run."""
_PROBE_STEPS = 4
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Choice:
    """An interval, why it is that long, and which part of the time it costs: saving, and redoing what a failure takes."""

    seconds: float
    reason: str
    cost: float


def failure_every_s(world_size: int, faults: int, run_s: float) -> float:
    """Seconds between failures of the whole job: the published rate at first, then what this run has seen, should that be worse."""
    published = _YEAR_S / (FAILURES_PER_DEVICE_YEAR * world_size)
    believed_s = min(published, _BELIEVED_S)
    return min(published, (believed_s + run_s) / (believed_s / published + faults))


def optimum(stall_s: float, durable_s: float, failure_s: float) -> Choice:
    """Young's interval, the square root of 2 × stall × time between failures; longer where it would cost too much or outrun storage."""
    young = math.sqrt(2 * stall_s * failure_s)
    spent, storage = stall_s / MOST_SPENT, durable_s
    seconds = max(young, spent, storage)
    reason = f"a save stalls {stall_s * 1e3:.1f} ms and a failure is to be expected every {failure_s / 3600:.1f} h"
    if seconds == storage and storage > young:
        reason += f"; storage needs {durable_s:.1f} s for one"
    elif seconds == spent and spent > young:
        reason += f"; saving is held to {MOST_SPENT:.0%} of the time"
    cost = stall_s / (seconds + stall_s) + (seconds / 2 + durable_s) / failure_s
    return Choice(seconds, reason, min(cost, 1.0))


def interval_of(every: int | str) -> int | float | None:
    """Steps (an int), seconds (a float) or None for "auto"; ValueError says what can be given."""
    if isinstance(every, bool) or not isinstance(every, (int, str)):
        raise ValueError(f"every={every!r}: give a number of steps, a time such as '30s' or '5m', or 'auto'")
    if isinstance(every, int):
        if every < 1:
            raise ValueError(f"every={every}: a checkpoint can be saved every 1, 2, 3 … steps")
        return every
    if every == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", every)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"every={every!r}: give a number of steps, a time such as '30s' or '5m', or 'auto'")
    return float(match[1]) * _UNITS[match[2]]


@dataclass
class Cadence:
    """When the next save is due, counted in steps so that all ranks agree without asking each other at every step."""

    interval: int | float | None
    due: int | None = None
    """The step at which a time is turned into steps again; None before the first."""
    saves: bool = False
    """Whether a save is due at that step, or only the look at how long steps take."""
    _ended: deque[float] = field(default_factory=lambda: deque(maxlen=33))

    def passed(self, step: int, now: float) -> bool:
        """A step has ended; whether something is due at it."""
        if isinstance(self.interval, int):
            self.saves = True
            return step % self.interval == 0
        self._ended.append(now)
        if self.due is None:
            self.due = step + _PROBE_STEPS
        return step >= self.due

    @property
    def step_s(self) -> float:
        """How long a step takes, by the median of the last ones."""
        times = [b - a for a, b in zip(self._ended, list(self._ended)[1:], strict=False)]
        return statistics.median(times) if times else 0.0

    def steps_for(self, seconds: float) -> int:
        """So many steps fill these seconds."""
        return max(1, round(seconds / self.step_s)) if self.step_s > 0 else 1

    def steps_beyond(self, seconds: float) -> int:
        """The fewest steps that take at least so long."""
        return max(1, math.ceil(seconds / self.step_s)) if self.step_s > 0 else 1

    def next_at(self, step: int) -> None:
        """All ranks have agreed on the next save."""
        self.due, self.saves = step, True
