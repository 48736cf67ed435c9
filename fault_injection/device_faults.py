"""What a chaos entry does to a simulated GPU, in the terms of its state file."""

from __future__ import annotations

from .plan import Fault
from .simulated_gpus import SimulatedGpus

_SETTINGS: dict[str, tuple[str, int]] = {
    "gpu-lost": ("gone", 1),  # off the bus, without any XID
    "ecc": ("ecc_uncorrected", 1),
    "throttle": ("clock_reasons", 0x40),
    "remap-failure": ("remap_failure", 1),
    "memory-held": ("memory_used", 40 << 30),
    "probe-hang": ("hangs", 1),
    "probe-error": ("returns", 999),
}


def harm(gpus: SimulatedGpus, device: int, fault: Fault) -> None:
    """Do to a device what an entry of one of plan.DEVICE_KINDS says."""
    if fault.kind == "xid":
        gpus.xid(device, fault.code)
        return
    what, value = ("field.230", fault.code) if fault.kind == "recovery" else _SETTINGS[fault.kind]
    gpus.set(device, what, value, for_s=fault.for_s)
