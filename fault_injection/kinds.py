"""The kinds of faults that chaos can inflict, each with what it does, whom it takes, who inflicts it and how it has to be answered."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class By(Enum):
    """Who inflicts a fault once a rank, or the clock, has found it due."""

    RANK = "rank"  # the rank on itself
    DEVICE = "device"  # the launcher, on a slot's (simulated) device
    KEEPER = "keeper"  # the process that writes checkpoints, on what it writes; it also finds it due
    LAUNCHER = "launcher"  # the launcher, on itself and the processes beside the ranks


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind. `sends` is the signal that inflicts it, where a signal does: then the supervisor can, at a time of its own."""

    what: str
    keys: tuple[str, ...] = ("rank",)
    """What may follow the colon; of rank and slot exactly one must, where there are any."""
    sends: signal.Signals | None = None
    by: By = By.RANK
    needs: Mapping[str, int] | None = None
    """Keys with the value they have if none is given."""
    shows: tuple[str, ...] = ()
    """The kinds of failure, one of which has to be on record after it; empty where a run may go on without a word."""

    @property
    def on_device(self) -> bool:
        """It is done to a slot's device; the rank is left alone."""
        return self.by is By.DEVICE

    @property
    def has_target(self) -> bool:
        """It takes a rank or a slot; one without is the business of the node that has rank 0."""
        return "rank" in self.keys

    @property
    def from_outside(self) -> bool:
        """The launcher inflicts it when its moment is a time: a rank that waits in a collective never comes to look at a clock."""
        return self.by in (By.DEVICE, By.LAUNCHER) or self.sends is not None


_SLOT = ("rank", "slot", "for")
_CODED = (*_SLOT, "code")
_DIES, _HANGS, _RAISES, _LOST = ("signal",), ("hang",), ("exception",), ("slot-lost",)
_SICK = ("slot-lost", "device", "node-sick")

KINDS: Mapping[str, Kind] = {
    "kill": Kind(what="SIGKILL: no handler runs, nothing is said", sends=signal.SIGKILL, shows=_DIES),
    "segv": Kind(what="SIGSEGV: a crash in native code", sends=signal.SIGSEGV, shows=_DIES),
    "abort": Kind(what="SIGABRT: an assertion in native code, or NCCL's watchdog", sends=signal.SIGABRT, shows=_DIES),
    "hang": Kind(what="SIGSTOP: the whole process stands still", sends=signal.SIGSTOP, shows=_HANGS),
    "stall": Kind(what="the script sleeps for ever in Python; its other threads go on", shows=_HANGS),
    "gil": Kind(what="native code holds the interpreter's lock for ever: no thread of Python runs", shows=_HANGS),
    "deadlock": Kind(what="the rank waits in a collective for a message that nobody sends", shows=_HANGS),
    "oom": Kind(what="the rank fills its memory up to a limit of its own address space, and gets a MemoryError", shows=_RAISES),
    "param-flip": Kind(what="one bit of a parameter that the rank trains is another one, without a word", shows=("replicas",)),
    "slow": Kind(what="every step from then on takes `factor` times as long", keys=("rank", "factor"), needs={"factor": 3}),
    "raise": Kind(what="an exception in the script", shows=_RAISES),
    "exit": Kind(what="the script leaves with a status", keys=("rank", "code"), needs={"code": 1}, shows=_RAISES),
    "loader-kill": Kind(what="SIGKILL for a worker process of the rank's DataLoader", shows=_RAISES),
    "loader-stall": Kind(what="SIGSTOP for a worker process of the rank's DataLoader", shows=_HANGS),
    "peers-cut": Kind(what="the rank's connections to its peers break", shows=("connection", "exception", "signal")),
    "store-cut": Kind(what="the rank's connection to the store breaks"),
    "net-loss": Kind(
        what="the rank's connections lose `percent` of what is sent to them", keys=("rank", "percent", "for"), needs={"percent": 30}
    ),
    "net-partition": Kind(what="nothing that is sent to the rank arrives, and nobody is told", keys=("rank", "for")),
    "net-delay": Kind(what="what the rank sends to anyone is there `ms` milliseconds later", keys=("rank", "ms", "for"), needs={"ms": 50}),
    "net-slow": Kind(what="the rank sends no more than `kib` KiB a second to anyone", keys=("rank", "kib", "for"), needs={"kib": 64}),
    "slot-lost": Kind(what="SIGKILL, and the slot is not to be used any more", keys=("rank", "slot"), sends=signal.SIGKILL, shows=_LOST),
    "gpu-lost": Kind(what="the GPU falls off the bus, without any XID", keys=_SLOT, by=By.DEVICE, shows=_SICK),
    "xid": Kind(what="the GPU reports XID `code`", keys=("rank", "slot", "code"), by=By.DEVICE, needs={"code": 79}),
    "ecc": Kind(what="the GPU counts an uncorrectable memory error", keys=_SLOT, by=By.DEVICE, shows=_SICK),
    "recovery": Kind(what="the driver wants recovery action `code` (NVML field 230)", keys=_CODED, by=By.DEVICE, needs={"code": 1}),
    "throttle": Kind(what="the GPU's hardware slows its clocks for its heat", keys=_SLOT, by=By.DEVICE),
    "remap-failure": Kind(what="the GPU could not remap a row of its memory", keys=_SLOT, by=By.DEVICE, shows=_SICK),
    "memory-held": Kind(what="40 GiB of the GPU's memory are in use, and the driver does not say by whom", keys=_SLOT, by=By.DEVICE),
    "probe-hang": Kind(what="questions to the driver about the GPU never return", keys=_SLOT, by=By.DEVICE),
    "probe-error": Kind(what="every question to the driver about the GPU fails", keys=_SLOT, by=By.DEVICE),
    "enospc": Kind(what="storage has no space left (without for: at one call)", keys=("for",), by=By.KEEPER),
    "eio": Kind(what="storage answers with an I/O error (without for: at one call)", keys=("for",), by=By.KEEPER),
    "read-only": Kind(what="storage is mounted read-only (without for: at one call)", keys=("for",), by=By.KEEPER),
    "slow-storage": Kind(what="each call to storage takes `ms` longer", keys=("for", "ms"), by=By.KEEPER, needs={"ms": 50}),
    "torn-write": Kind(what="half of a shard never reaches storage, without a word", keys=(), by=By.KEEPER),
    "bit-flip": Kind(what="one bit of a shard is another one on storage", keys=(), by=By.KEEPER),
    "removed-file": Kind(what="a shard of a complete checkpoint is deleted", keys=(), by=By.KEEPER),
    "supervisor-kill": Kind(what="SIGKILL for goodrun itself: its ranks die with it", keys=(), by=By.LAUNCHER),
    "keeper-kill": Kind(what="SIGKILL for the process that writes checkpoints", keys=(), by=By.LAUNCHER),
    "nursery-kill": Kind(what="SIGKILL for the process that ranks are forked from", keys=(), by=By.LAUNCHER),
    "prober-kill": Kind(what="SIGKILL for the process that asks the GPUs' driver", keys=(), by=By.LAUNCHER),
    "preempt": Kind(what="SIGTERM for goodrun, and SIGKILL after `grace` (30s)", keys=("grace",), by=By.LAUNCHER),
    "clock-jump": Kind(what="the launcher's wall clock jumps by `by` (1h; -1h is back)", keys=("by",), by=By.LAUNCHER),
}
DEVICE_KINDS = frozenset(name for name, kind in KINDS.items() if kind.on_device)
STORAGE_KINDS = frozenset(name for name, kind in KINDS.items() if kind.by is By.KEEPER)
ENDS_THE_LAUNCHER = frozenset({"supervisor-kill", "preempt"})
"""After these somebody else has to start the job again."""
