"""A chaos plan: who is hurt, how and when, as frozen entries; pure. notation.py reads one from text."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from .kinds import KINDS, By

CHAOS_VARIABLE = "GOODRUN_CHAOS"
"""The plan as a worker gets it: `to_env` of what is left of it."""
RUN_STARTED_VARIABLE = "GOODRUN_RUN_STARTED_MONO"
"""The monotonic second at which the run (not the attempt) began."""
SLOT_VARIABLE = "GOODRUN_SLOT"
"""The device slot that a worker is bound to."""

MAX_FAULTS = 63  # a rank tells which entries fired as bits of one signed 64-bit word
PHASES = ("start", "save", "restore")


class ChaosError(ValueError):
    """The chaos plan cannot be carried out as written; the user's to mend, before anything is started."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of a plan: at most one of `rank` and `slot`, and at least one of `at_step`, `at_s` and `at_phase`, is set."""

    index: int
    kind: str
    rank: int | None = None
    slot: int | None = None
    at_step: int | None = None
    at_s: float | None = None
    at_phase: str | None = None
    """One of PHASES: at the beginning of the next one (from step `at_step` on, where that is set, too)."""
    from_attempt: int = 0
    """Not in an attempt before this one."""
    code: int = 1
    factor: int = 1
    """How many times as long a slow rank's steps take."""
    ms: int = 0
    percent: int = 0
    kib: int = 0
    for_s: float | None = None
    """How long a fault of a device, of storage or of the network lasts; None is for good, or once."""
    grace_s: float = 30.0
    by_s: float = 3600.0
    text: str = ""

    @property
    def from_outside(self) -> bool:
        """The launcher finds it due, by the clock; all others are found due by the rank itself, after a step or in a phase."""
        return self.at_s is not None and KINDS[self.kind].from_outside


def check_plan(plan: Sequence[Fault], world_size: int, slots: Collection[int]) -> None:
    """Refuse entries that can never fire: a rank or a device slot that the job does not have."""
    for fault in plan:
        if fault.rank is not None and fault.rank >= world_size:
            raise ChaosError(
                f"chaos entry {fault.text!r} names rank {fault.rank}, but this job has {world_size} "
                f"{'rank' if world_size == 1 else 'ranks'}; name one of 0 to {world_size - 1}."
            )
        if fault.slot is not None and fault.slot not in slots:
            known = ", ".join(str(slot) for slot in sorted(slots))
            raise ChaosError(f"chaos entry {fault.text!r} names slot {fault.slot}, but this node has only {known}; name one of these.")


def remaining(plan: Sequence[Fault], fired: Collection[int], attempt: int | None = None) -> tuple[Fault, ...]:
    """What has not fired yet; of it only what may fire in `attempt`, if one is given."""
    return tuple(f for f in plan if f.index not in fired and (attempt is None or f.from_attempt <= attempt))


def due(plan: Sequence[Fault], fired: Collection[int], elapsed_s: float, attempt: int | None = None) -> tuple[Fault, ...]:
    """What the supervisor has to inflict now, `elapsed_s` seconds into the run, the earliest first."""
    left = remaining(plan, fired, attempt)
    ripe = [(f.at_s, f.index, f) for f in left if f.from_outside and f.at_s is not None and f.at_s <= elapsed_s]
    return tuple(fault for _, _, fault in sorted(ripe, key=lambda item: item[:2]))


def for_rank(plan: Sequence[Fault], rank: int, slot: int | None = None) -> tuple[Fault, ...]:
    """What this rank, bound to this device slot, has to find due; what has no target is rank 0's to watch for."""

    def is_mine(f: Fault) -> bool:
        return f.rank == rank or (f.slot is not None and f.slot == slot) or (rank == 0 and not KINDS[f.kind].has_target)

    return tuple(f for f in plan if not f.from_outside and KINDS[f.kind].by is not By.KEEPER and is_mine(f))


def for_keeper(plan: Sequence[Fault]) -> tuple[Fault, ...]:
    """What the process that writes checkpoints has to inflict on them."""
    return tuple(f for f in plan if KINDS[f.kind].by is By.KEEPER)


def to_env(plan: Sequence[Fault]) -> str:
    """The plan as the value of an environment variable."""
    return json.dumps([asdict(fault) for fault in plan])


def from_env(value: str) -> tuple[Fault, ...]:
    """The plan that `to_env` wrote."""
    return tuple(Fault(**fields) for fields in json.loads(value))
