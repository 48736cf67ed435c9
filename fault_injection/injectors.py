"""What a rank does to itself when its entry of the chaos plan is due; imported by a worker only if its run has a plan."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..progress import Page, Phase
from . import network_faults
from .kinds import KINDS, By
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
        for fault in [f for f in self._waiting if f.at_phase is None and _is_due(f, step, elapsed) and _can(f)]:
            self._fire(fault, f"after step {step}")

    def at_boot(self) -> None:
        """The interpreter is up, and there is no script yet that could be interrupted: only what comes from outside can come now."""
        for fault in [f for f in self._waiting if f.at_phase == "start" and KINDS[f.kind].from_outside]:
            self._fire(fault, "at the start")

    def on_phase(self, phase: Phase) -> None:
        """This rank enters a phase (start: when the process group is to be made): inflict what waits for it."""
        name = phase.name.lower()
        for fault in [f for f in self._waiting if f.at_phase == name and self._page.step >= (f.at_step or -1) and _can(f)]:
            self._fire(fault, f"in phase {name}")

    def _fire(self, fault: Fault, when: str) -> None:
        self._waiting.remove(fault)
        self._page.chaos_fires(fault.index)  # before the deed: there may be nobody left to tell of it
        if fault.kind == "slow":
            self._factor, self._step_t = fault.factor, self._clock()
        _inflict(fault, when)


def arm(env: Mapping[str, str], page: Page) -> Armed:
    """Take this rank's part of the plan out of the environment, and hang it on the page; what is due at the start comes now."""
    slot = env.get(SLOT_VARIABLE)
    faults = for_rank(from_env(env[CHAOS_VARIABLE]), int(env["RANK"]), int(slot) if slot else None)
    armed = Armed(faults, page, float(env[RUN_STARTED_VARIABLE]))
    page.after_step, page.on_phase = armed.after_step, armed.on_phase
    armed.at_boot()
    return armed


def _is_due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.at_step is not None:
        return step >= fault.at_step
    return fault.at_s is not None and elapsed_s >= fault.at_s


def _can(fault: Fault) -> bool:
    """Whether there is something to be hurt; what there is not yet is waited for."""
    return not fault.kind.startswith("loader-") or bool(multiprocessing.active_children())


def _inflict(fault: Fault, when: str) -> None:
    kind = KINDS[fault.kind]
    if kind.by is not By.RANK:
        return  # the supervisor reads on the page that it is due, and does it
    if kind.sends is not None:  # of a lost slot a rank sees no more than its own end; a stopped one goes on after SIGCONT
        os.kill(os.getpid(), kind.sends)
        return
    match fault.kind:
        case "raise":
            raise ChaosRaised(f"chaos: {fault.text!r} fired {when}")
        case "exit":
            raise SystemExit(fault.code)
        case "stall":
            threading.Event().wait()
        case "gil":
            _hold_interpreter_lock()
        case "deadlock":
            _wait_for_nobody()
        case "oom":
            _fill_memory()
        case "param-flip":
            _flip_a_bit()
        case "loader-kill" | "loader-stall":
            worker = min(child.pid or 0 for child in multiprocessing.active_children())
            os.kill(worker, signal.SIGKILL if fault.kind == "loader-kill" else signal.SIGSTOP)
        case "store-cut" | "peers-cut":
            network_faults.cut(to_store=fault.kind == "store-cut")
        case "net-partition" | "net-loss":
            network_faults.lose(100 if fault.kind == "net-partition" else fault.percent, fault.for_s)
        case "net-delay":
            network_faults.delay(fault.ms, fault.for_s)
        case "net-slow":
            network_faults.slow(fault.kib, fault.for_s)


def _wait_for_nobody() -> None:
    """Wait in torch's own code for a message that no peer is going to send."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def _flip_a_bit() -> None:
    """Change a parameter as a device that computes wrongly would; whose optimizer is the oldest, if there are several."""
    import torch

    optimizer = next(o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer))
    first = optimizer.param_groups[0]["params"][0].detach()
    first.view(-1).view(torch.uint8)[1] ^= 0x40  # in float32 a bit in the middle of the mantissa


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
