"""The launcher's own share of a chaos plan: what ranks and keeper are told of it, what comes by the clock, what it does itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..fault_injection import CHAOS_VARIABLE, KINDS, RUN_STARTED_VARIABLE, Fault, due, for_keeper, remaining, to_env
from ..progress import Progress
from . import processes
from .attempt import Attempt
from .devices.ward import Ward
from .events import ChaosFired, RunStarted
from .journal import read_events
from .keeper import KeeperProcess
from .nursery import Nursery
from .recorder import Recorder
from .workers import Rank


@dataclass(kw_only=True)
class Inflicting:
    """Carries out `plan`; each entry once in the run, as the recorder knows."""

    plan: tuple[Fault, ...]
    recorder: Recorder
    ward: Ward | None
    keeper: KeeperProcess | None
    nursery: Nursery | None
    started_t: float
    """Monotonic seconds at which the run began, from which faults by the clock count."""
    harm: Callable[[Fault, int], None] = lambda fault, slot: None
    """Does a fault to the simulated device of a slot."""
    _lost_slots: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.recorder.carry_out, self.recorder.can = self._carry_out, self._can

    def env(self, attempt: int) -> dict[str, str]:
        """What the ranks of an attempt need to carry out their share."""
        left = remaining(self.plan, self.recorder.fired, attempt)
        return {CHAOS_VARIABLE: to_env(left), RUN_STARTED_VARIABLE: repr(self.started_t)} if left else {}

    def slot_lost(self, r: Rank, page: Progress) -> bool:
        """Whether a rank that was killed lost its slot by the plan."""
        by_itself = any(f.kind == "slot-lost" and page.chaos_fired >> f.index & 1 for f in self.plan)
        return by_itself or r.slot in self._lost_slots

    def tend(self, attempt: Attempt, generation: int) -> None:
        """Take in what the keeper has done to its storage, and inflict what is due by the clock."""
        if self.keeper is not None and self.keeper.chaos_page is not None:
            self.recorder.chaos_of(-1, -1, self.keeper.chaos_page.read())
        for fault in due(self.plan, self.recorder.fired, time.monotonic() - self.started_t, generation):
            wanted = fault.rank if KINDS[fault.kind].has_target else 0
            target = next((r for r in attempt.ranks if r.code is None and (r.rank == wanted or r.slot == fault.slot)), None)
            if target is None or not self._can(fault, target.slot):
                continue  # it would never be noticed: later
            if fault.kind == "slot-lost":
                self._lost_slots.add(target.slot)
            self.recorder.chaos_from_outside(fault, target.rank, target.slot)
            if (signum := KINDS[fault.kind].sends) is not None:
                attempt.hurt.add(target.rank)
                processes.send(target.pid, signum)

    def _can(self, fault: Fault, slot: int | None = None) -> bool:
        if KINDS[fault.kind].on_device:
            return slot is None or (self.ward is not None and self.ward.watched(slot))
        return bool(self._victim(fault)) if fault.kind in ("keeper-kill", "nursery-kill", "prober-kill") else True

    def _victim(self, fault: Fault) -> int:
        """The process that an entry is about; 0 while there is none."""
        owner = {"keeper-kill": self.keeper, "nursery-kill": self.nursery, "prober-kill": self.ward}[fault.kind]
        return 0 if owner is None else owner.pid

    def _carry_out(self, fault: Fault, slot: int) -> None:
        if KINDS[fault.kind].on_device:
            self.harm(fault, slot)
        match fault.kind:
            case "keeper-kill" | "nursery-kill" | "prober-kill":
                processes.send(self._victim(fault), signal.SIGKILL)
            case "supervisor-kill":
                processes.send(os.getpid(), signal.SIGKILL)
            case "preempt":
                processes.send(os.getpid(), signal.SIGTERM)
                late = threading.Timer(fault.grace_s, processes.send, (os.getpid(), signal.SIGKILL))
                late.daemon = True
                late.start()
            case "clock-jump":
                _jump(fault.by_s)


def earlier_lives(run_dir: Path, chaos: str) -> tuple[float, set[int]]:
    """When a run with this plan began, in monotonic seconds, and the entries that launchers before this one have seen fire."""
    now, started_t, fired = time.monotonic(), 0.0, set[int]()
    if chaos:
        for event in read_events(run_dir):
            if isinstance(event, RunStarted) and event.chaos != chaos:
                started_t, fired = 0.0, set()
            elif isinstance(event, RunStarted):
                started_t = started_t if 0 < started_t <= event.t else event.t
            elif isinstance(event, ChaosFired):
                fired.add(event.index)
    return started_t if 0 < started_t <= now else now, fired


def keeper_env(plan: tuple[Fault, ...], fired: set[int], started_t: float) -> dict[str, str]:
    """What a keeper needs to carry out its share; nothing where it has none."""
    left = for_keeper(remaining(plan, fired))
    return {CHAOS_VARIABLE: to_env(left), RUN_STARTED_VARIABLE: repr(started_t)} if left else {}


def _jump(by_s: float) -> None:
    """Have the wall clock of this process stand elsewhere; the machine's own is not ours to set."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + by_s
    time.time_ns = lambda: nanoseconds() + int(by_s * 1e9)
