"""What is wrong with a device, found by comparing its answers now with those at the job's start; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .answers import GPU_LOST, RESET_REQUIRED, Report, Told

_NOT_FOUND = 6
_INFOROM = 14
DRIVER_GONE = (9, 12, 18)
"""No driver, no library, or one that does not fit the driver: nothing can be asked any more, of any device."""
_HW_SLOWDOWN = 0x8 | 0x40 | 0x80
"""Slowdown, thermal slowdown and power brake by the hardware; the software's own reasons are benign."""
_FABRIC_NOT_SUPPORTED, _FABRIC_COMPLETED = 0, 3
_MASK_BAD = 1
"""Each thing the fabric's health mask tells has two bits: 0 not supported, 1 true, 2 false."""
_MASK_FIELDS = {"degraded bandwidth": 0, "route unhealthy": 4, "access timeout": 6}
_REPLAYS_PER_MINUTE = 0.15 * 16
"""DCGM's limit for the slowest generation with 16 lanes: a bit error rate of 1e-12."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about one device that the policy has a rule for."""

    device: str
    condition: str
    """A name of the policy's `conditions`, "xid" or "recovery-action"."""
    evidence: str = ""
    xid: int | None = None
    recovery_action: int | None = None
    """Field 230 as it was read; None where the device does not support it."""

    @property
    def name(self) -> str:
        """What people call it."""
        if self.xid is not None:
            return f"XID {self.xid}"
        return f"recovery action {self.recovery_action}" if self.condition == "recovery-action" else self.condition


def findings(first: Report, now: Report, minutes: float) -> list[Finding]:
    """Everything that is wrong in `now`; `first` is the same device's report at the start, `minutes` ago."""
    found = list(_presence(now)) or list(_failures(now))
    return found + list(_memory(first, now)) + list(_links(first, now, minutes)) + list(_condition(now))


def pace(now: Report) -> str:
    """What a device says of how fast it can go: its clock, its temperature, and what its hardware slows it for; empty if nothing."""
    clock, most, celsius = (now.value(query) for query in ("sm_clock", "sm_clock_max", "temperature"))
    reasons = (now.value("clock_reasons") or 0) & _HW_SLOWDOWN
    parts = [f"clock {clock} MHz" + (f" of {most}" if most is not None else "")] if clock is not None else []
    parts += [f"{celsius} °C"] if celsius is not None else []
    parts += [f"slowed by its hardware ({reasons:#x})"] if reasons else []
    return ", ".join(parts)


def slow_finding(device: str, evidence: str) -> Finding:
    """The rank on this device was slower than its peers while the hardware slowed the device all along."""
    return Finding(device=device, condition="slow", evidence=evidence)


def xid_finding(device: str, xid: int, recovery_action: int | None) -> Finding:
    """An XID event, with field 230 as it was read after it."""
    return Finding(device=device, condition="xid", evidence=f"XID {xid}", xid=xid, recovery_action=recovery_action)


def _presence(now: Report) -> Iterator[Finding]:
    codes = {a.code: f"{query}: {a.text}" for query, a in now.failed()}
    if GPU_LOST in codes:
        yield Finding(device=now.device, condition="lost", evidence=codes[GPU_LOST])
    elif RESET_REQUIRED in codes:
        yield Finding(device=now.device, condition="reset-required", evidence=codes[RESET_REQUIRED])
    elif (present := now.answers.get("present")) is not None and present.code == _NOT_FOUND:
        yield Finding(device=now.device, condition="gone", evidence=f"looked up by its UUID: {present.text}")


def _failures(now: Report) -> Iterator[Finding]:
    for query, answer in now.answers.items():
        if answer.told is Told.HUNG:
            yield Finding(device=now.device, condition="query-hangs", evidence=f"{query}: {answer.text}")
    failed = [(query, a) for query, a in now.failed() if a.code not in DRIVER_GONE]
    if any(a.code == _INFOROM for _, a in failed):
        yield Finding(device=now.device, condition="inforom", evidence="; ".join(f"{q}: {a.text}" for q, a in failed if a.code == _INFOROM))
    other = [(query, a) for query, a in failed if a.code != _INFOROM]
    if other:  # one finding for a round, however many questions failed in it
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        yield Finding(device=now.device, condition="driver-error", evidence=f"{other[0][0]}: {other[0][1].text}{more}")


def _memory(first: Report, now: Report) -> Iterator[Finding]:
    if rise := _rise(first, now, "ecc_uncorrected"):
        yield Finding(device=now.device, condition="ecc-uncorrected", evidence=f"{rise} since the job began")
    if now.value("remap_failure"):
        yield Finding(device=now.device, condition="remap-failure", evidence="the remap-failure flag is set")
    if now.value("remap_pending"):
        yield Finding(device=now.device, condition="remap-pending", evidence="a remap is pending")


def _links(first: Report, now: Report, minutes: float) -> Iterator[Finding]:
    before, active = first.value("nvlinks_active"), now.value("nvlinks_active")
    if before is not None and active is not None and active < before:
        yield Finding(device=now.device, condition="nvlink-down", evidence=f"{active} of {before} links are up")
    for query, condition in (("nvlink_errors", "nvlink-errors"), ("nvlink_crc", "nvlink-crc"), ("pcie_fatal", "pcie-fatal")):
        if rise := _rise(first, now, query):
            yield Finding(device=now.device, condition=condition, evidence=f"{rise} since the job began")
    replays = _rise(first, now, "pcie_replays")
    if minutes > 0 and replays / max(minutes, 1.0) > _REPLAYS_PER_MINUTE:
        yield Finding(device=now.device, condition="pcie-replays", evidence=f"{replays} in {minutes:.1f} minutes")
    fabric = now.value("fabric")
    if fabric is not None and fabric & 0xFF != _FABRIC_NOT_SUPPORTED:
        bad = [name for name, at in _MASK_FIELDS.items() if (fabric >> 8 >> at) & 3 == _MASK_BAD]
        if fabric & 0xFF != _FABRIC_COMPLETED:
            bad.insert(0, f"state {fabric & 0xFF}")
        if bad:
            yield Finding(device=now.device, condition="fabric", evidence=", ".join(bad))


def _condition(now: Report) -> Iterator[Finding]:
    if action := now.value("recovery_action"):
        yield Finding(device=now.device, condition="recovery-action", evidence=f"NVML field 230 is {action}", recovery_action=action)
    reasons = (now.value("clock_reasons") or 0) & _HW_SLOWDOWN
    celsius, limit = now.value("temperature"), now.value("temperature_limit")
    hot = f" at {celsius} °C" if celsius is not None else ""
    if reasons:
        yield Finding(device=now.device, condition="hw-slowdown", evidence=f"clock event reasons {reasons:#x}{hot}")
    if celsius is not None and limit is not None and 0 < limit < celsius:
        yield Finding(device=now.device, condition="too-hot", evidence=f"{celsius} °C, the limit is {limit} °C")


def _rise(first: Report, now: Report, query: str) -> int:
    before, after = first.value(query), now.value(query)
    return max(after - before, 0) if before is not None and after is not None else 0
