"""How often GPUs fail: the published rates, each with its source, and what follows for a job of N GPUs over some days."""

from __future__ import annotations

import math
from dataclasses import dataclass

YEAR_S = 365 * 86400.0
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published failure rate. `lost_share` is the part of the failures after which the GPU is of no use until it was repaired."""

    name: str
    per_gpu_year: float
    lost_share: float
    source: str


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            name="one-percent",
            per_gpu_year=0.01,
            lost_share=1.0,
            source="1 % of the GPUs fail in a year: an assumption made in public (Databricks, How we keep GPUs reliable, 2026); the "
            "records of large runs are 11 to 32 times that",
        ),
        Preset(
            name="llama3",
            per_gpu_year=419 / 54 / 16_384 * 365,
            lost_share=268 / 419,
            source="419 unexpected interruptions of 16,384 GPUs in 54 days, 268 of them the GPU's (The Llama 3 Herd of Models, "
            "arXiv 2407.21783, table 5: its counts, for its percentages do not fit them)",
        ),
        Preset(
            name="rsc-1",
            per_gpu_year=6.50 / 1000 / 8 * 365,
            lost_share=1.0,
            source="6.50 failures in 1,000 node-days of 8 GPUs (Meta RSC-1, arXiv 2410.21680)",
        ),
        Preset(
            name="rsc-2",
            per_gpu_year=2.34 / 1000 / 8 * 365,
            lost_share=1.0,
            source="2.34 failures in 1,000 node-days of 8 GPUs (Meta RSC-2, arXiv 2410.21680)",
        ),
        Preset(
            name="delta",
            per_gpu_year=YEAR_S / 3600 / (1.9 * 608),
            lost_share=77 / 1814,
            source="one error in 1.9 h on 608 H100 (Delta, arXiv 2503.11901 v4); 1,737 of 1,814 are XID 31, mostly the program's own fault",
        ),
        Preset(
            name="delta-hardware",
            per_gpu_year=77 / 3504 / 608 * YEAR_S / 3600,
            lost_share=1.0,
            source="the same without XID 31: 77 errors in 3,504 h on 608 H100 (Delta, arXiv 2503.11901 v4)",
        ),
    )
}


def mtbf_s(gpus: int, per_gpu_year: float) -> float:
    """Mean seconds between failures of the whole job."""
    per_s = gpus * per_gpu_year / YEAR_S
    return 1 / per_s if per_s else math.inf


def expected_failures(gpus: int, per_gpu_year: float, days: float) -> float:
    """How many failures the job meets on the mean."""
    return gpus * per_gpu_year * days * DAY_S / YEAR_S


def any_failure(gpus: int, per_gpu_year: float, days: float) -> float:
    """The probability of at least one, failures coming at a constant rate."""
    return -math.expm1(-expected_failures(gpus, per_gpu_year, days))


def any_failure_by_power(gpus: int, per_gpu_year: float, days: float) -> float:
    """The same, reading the rate as the probability that one GPU fails within a year: 1 - (1 - a)^(N T). NaN for a rate of 1 or more."""
    if per_gpu_year >= 1:
        return math.nan
    return -math.expm1(gpus * days * DAY_S / YEAR_S * math.log1p(-per_gpu_year))


def out_at_once(per_unit_year: float, repair_s: float) -> float:
    """The share of the time that one unit spends in repair."""
    down = per_unit_year / YEAR_S * repair_s
    return down / (1 + down)


def spares_for(units: int, out: float, confidence: float = 0.99) -> int:
    """The fewest spares that are enough, with this probability, for those of `units` that are out at a moment (binomial)."""
    if not 0 <= out < 1:
        raise ValueError(f"a unit cannot be out for {out:.0%} of the time")
    chance = math.exp(units * math.log1p(-out))
    if chance == 0.0:  # thousands are out: there the binomial is a normal distribution, and exp has no digits left
        mean, sd = units * out, math.sqrt(units * out * (1 - out))
        return math.ceil(mean + 2.3263 * sd) if confidence == 0.99 else math.ceil(mean + 4 * sd)
    spares, sure = 0, chance
    while sure < confidence and spares < units:
        chance *= (units - spares) / (spares + 1) * out / (1 - out)
        spares += 1
        sure += chance
    return spares
