"""The kinds of faults that chaos can inflict, each with what it does, whom it takes and who inflicts it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind. `sends` is the signal that inflicts it, where a signal does: then the supervisor can, at a time of its own."""

    what: str
    keys: tuple[str, ...] = ("rank",)
    """What may follow the colon; of rank and slot exactly one must."""
    sends: signal.Signals | None = None
    on_device: bool = False
    """It is done to a slot's (simulated) device, by the supervisor; the rank is left alone."""
    needs: Mapping[str, int] | None = None
    """Keys with the value they have if none is given."""

    @property
    def from_outside(self) -> bool:
        """The supervisor inflicts it when its moment is a time: a rank that waits in a collective never comes to look at a clock."""
        return self.on_device or self.sends is not None


_SLOT = ("rank", "slot", "for")
_CODED = (*_SLOT, "code")

KINDS: Mapping[str, Kind] = {
    "kill": Kind(what="SIGKILL: no handler runs, nothing is said", sends=signal.SIGKILL),
    "segv": Kind(what="SIGSEGV: a crash in native code", sends=signal.SIGSEGV),
    "abort": Kind(what="SIGABRT: an assertion in native code, or NCCL's watchdog", sends=signal.SIGABRT),
    "hang": Kind(what="SIGSTOP: the whole process stands still", sends=signal.SIGSTOP),
    "stall": Kind(what="the script sleeps for ever in Python; its other threads go on"),
    "gil": Kind(what="native code holds the interpreter's lock for ever: no thread of Python runs"),
    "oom": Kind(what="the rank fills its memory up to a limit of its own address space, and gets a MemoryError"),
    "slow": Kind(what="every step from then on takes `factor` times as long", keys=("rank", "factor"), needs={"factor": 3}),
    "raise": Kind(what="an exception in the script"),
    "exit": Kind(what="the script leaves with a status", keys=("rank", "code"), needs={"code": 1}),
    "slot-lost": Kind(what="SIGKILL, and the slot is not to be used any more", keys=("rank", "slot"), sends=signal.SIGKILL),
    "gpu-lost": Kind(what="the GPU falls off the bus, without any XID", keys=_SLOT, on_device=True),
    "xid": Kind(what="the GPU reports XID `code`", keys=("rank", "slot", "code"), on_device=True, needs={"code": 79}),
    "ecc": Kind(what="the GPU counts an uncorrectable memory error", keys=_SLOT, on_device=True),
    "recovery": Kind(what="the driver wants recovery action `code` (NVML field 230)", keys=_CODED, on_device=True, needs={"code": 1}),
    "throttle": Kind(what="the GPU's hardware slows its clocks for its heat", keys=_SLOT, on_device=True),
    "remap-failure": Kind(what="the GPU could not remap a row of its memory", keys=_SLOT, on_device=True),
    "probe-hang": Kind(what="questions to the driver about the GPU never return", keys=_SLOT, on_device=True),
    "probe-error": Kind(what="every question to the driver about the GPU fails", keys=_SLOT, on_device=True),
}
DEVICE_KINDS = frozenset(name for name, kind in KINDS.items() if kind.on_device)

