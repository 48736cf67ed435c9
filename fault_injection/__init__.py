"""Chaos: a short text becomes a plan of faults, each of which fires once. The injectors are not imported from here."""

from .kinds import DEVICE_KINDS, ENDS_THE_LAUNCHER, KINDS, STORAGE_KINDS, By
from .notation import parse_plan
from .plan import (
    CHAOS_VARIABLE,
    RUN_STARTED_VARIABLE,
    SLOT_VARIABLE,
    ChaosError,
    Fault,
    check_plan,
    due,
    for_keeper,
    for_rank,
    from_env,
    remaining,
    to_env,
)

__all__ = [
    "CHAOS_VARIABLE",
    "DEVICE_KINDS",
    "ENDS_THE_LAUNCHER",
    "KINDS",
    "RUN_STARTED_VARIABLE",
    "SLOT_VARIABLE",
    "STORAGE_KINDS",
    "By",
    "ChaosError",
    "Fault",
    "check_plan",
    "due",
    "for_keeper",
    "for_rank",
    "from_env",
    "parse_plan",
    "remaining",
    "to_env",
]
