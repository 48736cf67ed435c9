"""The supervisor's own share of a chaos plan: what the ranks are told of it, faults that come by the clock, slots that count as lost."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from ..fault_injection import DEVICE_KINDS, KINDS, Fault, due, remaining, to_env
from ..progress import Progress
from . import processes
from .attempt import Attempt
from .devices.ward import Ward
from .recorder import Recorder
from .workers import Rank


@dataclass(kw_only=True)
class Inflicting:
    """Carries out `plan`; each entry once in the run, as the recorder knows."""

    plan: tuple[Fault, ...]
    recorder: Recorder
    ward: Ward | None
    started_t: float
    """Monotonic seconds at which the run began, from which faults by the clock count."""
    _lost_slots: set[int] = field(default_factory=set)

    def env(self) -> dict[str, str]:
        """What the ranks of the next attempt need to carry out their share."""
        left = remaining(self.plan, self.recorder.fired)
        return {"GOODRUN_CHAOS": to_env(left), "GOODRUN_RUN_STARTED_MONO": repr(self.started_t)} if left else {}

    def slot_lost(self, r: Rank, page: Progress) -> bool:
        """Whether a rank that was killed lost its slot by the plan."""
        by_itself = any(f.kind == "slot-lost" and page.chaos_fired >> f.index & 1 for f in self.plan)
        return by_itself or r.slot in self._lost_slots

    def by_time(self, attempt: Attempt) -> None:
        """Inflict what is due by the clock."""
        for fault in due(self.plan, self.recorder.fired, time.monotonic() - self.started_t):
            target = next((r for r in attempt.ranks if r.code is None and (r.rank == fault.rank or r.slot == fault.slot)), None)
            if target is None or (fault.kind in DEVICE_KINDS and not (self.ward is not None and self.ward.watched(target.slot))):
                continue  # it would never be noticed: later
            if fault.kind == "slot-lost":
                self._lost_slots.add(target.slot)
            self.recorder.chaos_from_outside(fault, target.rank, target.slot)
            if fault.kind not in DEVICE_KINDS:
                attempt.hurt.add(target.rank)
                processes.send(target.pid, KINDS[fault.kind].sends or signal.SIGKILL)
