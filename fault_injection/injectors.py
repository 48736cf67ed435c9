"""What a rank does to itself when its entry of the chaos plan is due; imported by a worker only if its run has a plan."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ..progress import Page
from .plan import CHAOS_VARIABLE, DEVICE_KINDS, RUN_STARTED_VARIABLE, SLOT_VARIABLE, Fault, for_rank, from_env


class ChaosRaised(RuntimeError):
    """A `raise` entry of the chaos plan was due; nobody's fault, and nothing in the product catches it."""


class Armed:
    """The faults that wait for this rank; each fires once in this process."""

    def __init__(self, faults: Sequence[Fault], page: Page, run_started: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`run_started` is read on the same clock as `clock`."""
        self._waiting = list(faults)
        self._page = page
        self._run_started = run_started
        self._clock = clock

    def after_step(self, step: int) -> None:
        """Step `step` of the job is done in this rank: inflict what has fallen due."""
        if not self._waiting:
            return
        elapsed = self._clock() - self._run_started
        for fault in [f for f in self._waiting if _is_due(f, step, elapsed)]:
            self._waiting.remove(fault)
            self._page.chaos_fires(fault.index)  # before the deed: there may be nobody left to tell of it
            _inflict(fault, step)


def arm(env: Mapping[str, str], page: Page) -> Armed:
    """Take this rank's part of the plan out of the environment."""
    slot = env.get(SLOT_VARIABLE)
    faults = for_rank(from_env(env[CHAOS_VARIABLE]), int(env["RANK"]), int(slot) if slot else None)
    return Armed(faults, page, float(env[RUN_STARTED_VARIABLE]))


def _is_due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.at_step is not None:
        return step >= fault.at_step
    return fault.at_s is not None and elapsed_s >= fault.at_s


def _inflict(fault: Fault, step: int) -> None:
    if fault.kind in DEVICE_KINDS:
        return  # the supervisor reads on the page that it is due, and does it to the device
    match fault.kind:
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)  # whoever sends SIGCONT lets it go on
        case "raise":
            raise ChaosRaised(f"chaos: {fault.text!r} fired after step {step}")
        case "exit":
            raise SystemExit(fault.code)
        case _:  # kill; and slot-lost, of which a rank sees no more than its own end
            os.kill(os.getpid(), signal.SIGKILL)
