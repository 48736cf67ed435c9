"""What is left of the time: the best checkpoint interval and the goodput it gives, to first order and exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a failure and a checkpoint cost, in seconds."""

    detect_s: float = 0.0
    """From the fault to the decision to restart."""
    recover_s: float = 0.0
    """From there to the first new step."""
    stall_s: float = 0.0
    """How long training stands still for one checkpoint."""
    durable_s: float = 0.0
    """From the snapshot to the moment at which it can be restored after any failure."""

    @property
    def restart_s(self) -> float:
        """From the fault to the first new step."""
        return self.detect_s + self.recover_s


def young(mtbf_s: float, stall_s: float) -> float:
    """Young's interval (1974), the seconds of computing between two checkpoints."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(mtbf_s: float, stall_s: float) -> float:
    """Daly's interval (2006), good where the checkpoint is not much shorter than the time between failures."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s


def best_interval(mtbf_s: float, stall_s: float) -> float:
    """The interval at which `goodput` is greatest: the root of e^((T+d)/M) (1 - T/M) = 1.

    Neither the restart nor the time to durable moves it.
    """
    if math.isinf(mtbf_s) or stall_s <= 0:
        return young(mtbf_s, stall_s) if stall_s > 0 else 0.0
    d, low, high = stall_s / mtbf_s, 0.0, 1.0  # in units of the mean time between failures
    while low < (x := (low + high) / 2) < high:
        if x + d + math.log1p(-x) > 0:
            low = x
        else:
            high = x
    return low * mtbf_s


def goodput(mtbf_s: float, interval_s: float, costs: Costs) -> float:
    """The share of the time that ends up in kept steps, for failures at a constant rate that strike during recovery too.

    Between one failure and the next, (restart, compute T, stall d, compute T, …), a checkpoint counts once it is durable, L after it was
    taken. The time between failures is exponential with mean M, so that the number kept has the mean e^-(R+L)/M / (e^(T+d)/M - 1).
    """
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + costs.stall_s) if interval_s + costs.stall_s else 1.0
    period = (interval_s + costs.stall_s) / mtbf_s
    ratio = interval_s / mtbf_s / math.expm1(period) if period < 700 and period > 0 else float(period == 0)
    return ratio * math.exp(-(costs.restart_s + costs.durable_s) / mtbf_s)


def goodput_first_order(mtbf_s: float, interval_s: float, costs: Costs) -> float:
    """The same to first order, as it is usually quoted: each failure costs the restart, half an interval and the time to durable."""
    lost = (costs.restart_s + interval_s / 2 + costs.durable_s) / mtbf_s
    stalled = costs.stall_s / interval_s if interval_s else math.inf if costs.stall_s else 0.0
    return max(1 - lost, 0.0) / (1 + stalled)
