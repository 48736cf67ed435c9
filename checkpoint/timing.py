"""What saves cost in this run, measured, and the next save that follows from it, the same on all ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from .cadence import Cadence, Choice, failure_every_s, optimum
from .pending import PendingSave
from .ranks import Ranks


class Timing:
    """Watches saves and turns times into steps; rank 0 decides, and the others learn of it in one message a save."""

    def __init__(self, ranks: Ranks, note: Callable[[str], None]) -> None:
        """`note` keeps what rank 0 says in the record. Nothing is known yet."""
        self._ranks, self._note = ranks, note
        self._born = time.monotonic()
        self._stall_s = self._durable_s = 0.0
        self._said_s = 0.0
        self._pending: PendingSave | None = None

    def saves(self, pending: PendingSave) -> None:
        """A save was taken."""
        self._stall_s = pending.stall_s if not self._stall_s else (self._stall_s + pending.stall_s) / 2
        self._pending = pending

    def plan(self, cadence: Cadence, step: int) -> None:
        """Name the step of the next save, on all ranks alike; nothing where saves are counted in steps anyway."""
        if isinstance(cadence.interval, int):
            return
        cadence.next_at(self._ranks.from_first(lambda: step + self._steps(cadence)))

    def _steps(self, cadence: Cadence) -> int:
        if cadence.interval is not None:
            return cadence.steps_for(cadence.interval)
        if not self._stall_s:  # nothing is known of a save before the first
            return 1
        if self._pending is not None and self._pending.done:
            self._durable_s = self._pending.durable_s
        faults = int(os.environ.get("GOODRUN_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        failure_s = failure_every_s(self._ranks.size, faults, time.monotonic() - self._born)
        choice = optimum(self._stall_s, self._durable_s, failure_s)
        steps = cadence.steps_beyond(choice.seconds)
        self._say(choice, steps)
        return steps

    def _say(self, choice: Choice, steps: int) -> None:
        if not self._said_s / 2 < choice.seconds < self._said_s * 2:
            self._said_s = choice.seconds
            text = f"a checkpoint every {steps} steps ({choice.seconds:.1f} s): {choice.reason}; saving and redoing cost {choice.cost:.2%}"
            print(f"goodrun: {text}", file=sys.stderr, flush=True)
            self._note(text)
