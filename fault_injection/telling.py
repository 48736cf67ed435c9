"""Chaos in words: what kinds there are, and what a plan is going to do."""

from __future__ import annotations

from collections.abc import Sequence

from .kinds import KINDS
from .notation import TIMES
from .plan import Fault

_NOTES = """
Each at @step=N of the job; at a time since the run began, as in @40s, @500ms, @2m; or in a phase, as in @phase=start, @phase=restore,
@phase=save,step=30. With attempt=N behind that, not before the N-th restart. Several are parted by ';'.
for=TIME: how long a fault of a GPU or of the network lasts; without it, for good. GPUs are simulated ones (--simulate-gpus N).
random:mtbf=30s,seed=7,of=kill|hang,n=10 stands for ten faults at random moments (mtbf=20: so many steps); a seed always gives the same."""


def kinds_told() -> str:
    """A line for each kind: an entry as it can be written, less its moment, and what it does."""
    lines = []
    for name, kind in KINDS.items():
        values = kind.needs or {}
        keys = [key for key in kind.keys if key != "rank" or "slot" not in kind.keys]
        takes = ",".join(f"{key}={values.get(key, 'TIME' if key in TIMES else 'N')}" for key in keys)
        lines.append(f"{f'{name}:{takes}' if takes else name:32}  {kind.what}")
    return "\n".join([*lines, _NOTES])


def plan_told(plan: Sequence[Fault]) -> str:
    """A line for each entry, in the order in which they fall due: those at a step first, for their times are not known."""
    ordered = sorted(plan, key=lambda f: (f.at_s is not None, f.from_attempt, f.at_step or 0, f.at_s or 0.0, f.index))
    return "\n".join(f"{_moment(f):14} {_target(f):8} {f.kind:14} {KINDS[f.kind].what}{_lasting(f)}" for f in ordered)


def _moment(fault: Fault) -> str:
    parts = [f"at {fault.at_s:g} s"] if fault.at_s is not None else []
    if fault.at_phase is not None:
        parts.append(f"in a {fault.at_phase}" + ("" if fault.at_step is None else f" from step {fault.at_step}"))
    elif fault.at_step is not None:
        parts.append(f"after step {fault.at_step}")
    return ", ".join([*parts, *([f"attempt {fault.from_attempt} on"] if fault.from_attempt else [])])


def _target(fault: Fault) -> str:
    if not KINDS[fault.kind].has_target:
        return "-"
    return f"rank {fault.rank}" if fault.slot is None else f"slot {fault.slot}"


def _lasting(fault: Fault) -> str:
    numbers = {"code": fault.code, "factor": fault.factor, "ms": fault.ms, "percent": fault.percent, "kib": fault.kib}
    said = [f"{key} {numbers[key]}" for key in KINDS[fault.kind].needs or {}]
    said += [] if fault.for_s is None else [f"for {fault.for_s:g} s"]
    said += [f"after {fault.grace_s:g} s"] if fault.kind == "preempt" else [f"by {fault.by_s:g} s"] if fault.kind == "clock-jump" else []
    return f" ({', '.join(said)})" if said else ""
