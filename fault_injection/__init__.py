"""Chaos: a short text becomes a plan of faults, each of which fires once. The injectors are not imported from here."""

from .kinds import DEVICE_KINDS, KINDS
from .plan import (
    CHAOS_VARIABLE,
    RUN_STARTED_VARIABLE,
    SLOT_VARIABLE,
    ChaosError,
    Fault,
    check_plan,
    due,
    for_rank,
    from_env,
    parse_plan,
    remaining,
    to_env,
)

__all__ = [
    "CHAOS_VARIABLE",
    "DEVICE_KINDS",
    "KINDS",
    "RUN_STARTED_VARIABLE",
    "SLOT_VARIABLE",
    "ChaosError",
    "Fault",
    "check_plan",
    "due",
    "for_rank",
    "from_env",
    "parse_plan",
    "remaining",
    "to_env",
]
