"""What a rank does to itself when its entry of the chaos plan is due; imported by a worker only if its run has a plan."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..progress import Page
from .kinds import KINDS
from .plan import CHAOS_VARIABLE, RUN_STARTED_VARIABLE, SLOT_VARIABLE, Fault, for_rank, from_env

_OOM_AFTER = 256 << 20


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
        self._factor, self._step_t = 1, clock()

    def after_step(self, step: int) -> None:
        """Step `step` of the job is done in this rank: inflict what has fallen due."""
        if self._factor > 1:
            time.sleep((self._factor - 1) * (self._clock() - self._step_t))
            self._step_t = self._clock()
        if not self._waiting:
            return
        elapsed = self._clock() - self._run_started
        for fault in [f for f in self._waiting if _is_due(f, step, elapsed)]:
            self._waiting.remove(fault)
            self._page.chaos_fires(fault.index)  # before the deed: there may be nobody left to tell of it
            if fault.kind == "slow":
                self._factor, self._step_t = fault.factor, self._clock()
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
    kind = KINDS[fault.kind]
    if kind.on_device:
        return  # the supervisor reads on the page that it is due, and does it to the device
    if kind.sends is not None:  # of a lost slot a rank sees no more than its own end; a stopped one goes on after SIGCONT
        os.kill(os.getpid(), kind.sends)
        return
    match fault.kind:
        case "raise":
            raise ChaosRaised(f"chaos: {fault.text!r} fired after step {step}")
        case "exit":
            raise SystemExit(fault.code)
        case "stall":
            threading.Event().wait()
        case "gil":
            _hold_interpreter_lock()
        case "oom":
            _fill_memory()


def _hold_interpreter_lock() -> None:
    """Wait in native code for what never comes; a mutex, because a sleep ends with the first signal."""
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock during a call
    mutex = ctypes.create_string_buffer(128)  # all zeros is an ordinary, unlocked one
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _fill_memory() -> None:
    """Have this process run out of memory, and the machine not."""
    with open("/proc/self/statm", encoding="ascii") as f:
        held = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _OOM_AFTER, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = []
    while True:
        hoard.append(bytearray(_OOM_AFTER // 8))
