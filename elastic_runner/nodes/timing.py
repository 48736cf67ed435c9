"""The times that membership goes by, and why they stand in this order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds. A node that hears nothing stops its ranks after `fence_s`; only after `dead_s` may others go on without it."""

    beat_s: float = 0.15
    """How often a leader asks for a sign of life."""
    fence_s: float = 1.3
    """A node whose last word from a majority is older has been left behind, for all it knows, and kills its ranks."""
    dead_s: float = 1.75
    """A node that is silent for so long is given up. The half second between is for killing ranks on a loaded machine."""
    settle_s: float = 0.5
    """How long endpoints earlier in the list are waited for before a later one is followed."""
    return_s: float = 2.0
    """How long a new leader waits for nodes of the last round that have not turned to it yet."""
    answer_s: float = 3.0
    """How long a proposal may take before it is made anew."""
    last_call_s: float = 10.0
    """How long the first round waits for more nodes once there are enough; `--rdzv-conf last_call_timeout=…`."""
    grow_s: float = 600.0
    """How long a node that could join waits for the next checkpoint at most."""

    def __post_init__(self) -> None:
        if not 3 * self.beat_s < self.fence_s < self.dead_s:
            raise ValueError("the times of membership must be in order: three beats < fence < dead")
