"""The answer to `goodrun plan`: one job, the failures it will meet, and what it comes to with and without goodrun."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import rates, yields
from .simulation import Scenario, Simulated
from .yields import Costs

STOCK = Costs(detect_s=600.0, recover_s=300.0, stall_s=66.0)
"""Without goodrun: a watchdog of ten minutes, torch's own for NCCL; `torch.save` of a 2.8 B model on 32 H100 (Databricks, 2026)."""
GOODRUN = Costs(detect_s=10.0, recover_s=300.0, stall_s=36.0, durable_s=66.0)
"""With goodrun, before anything was measured: heartbeats of ten seconds, the same model saved asynchronously. The restart is taken to be
no faster, for that depends on the job; `--from` takes it from a run."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked about. `source` says where the rate comes from."""

    gpus: int
    days: float
    per_gpu_year: float
    source: str
    lost_share: float = 1.0
    repair_s: float = rates.DAY_S
    price: float = 0.0
    """Of one GPU-hour; 0 where it was not given."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint interval and what is left of the time."""

    name: str
    interval_s: float
    first_order: float
    exact: float
    simulated: Simulated | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The job with one set of costs. `best` is the row of the best interval; `lost_gpu_hours` what it loses even so."""

    name: str
    costs: Costs
    costs_from: str
    rows: tuple[Row, ...]
    best: Row
    lost_gpu_hours: float
    lost_money: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that `goodrun plan` prints."""

    job: Job
    any_failure: float
    any_failure_by_power: float | None
    expected_failures: float
    mtbf_s: float
    spares: int
    gpu_hours: float
    money: float
    variants: tuple[Variant, ...] = field(default=())


def make_plan(job: Job, variants: Sequence[tuple[str, Costs, str]], intervals: Sequence[float] = ()) -> Plan:
    """Work it out; each variant is a name, its costs and where those come from."""
    mtbf = rates.mtbf_s(job.gpus, job.per_gpu_year)
    power = rates.any_failure_by_power(job.gpus, job.per_gpu_year, job.days)
    hours = job.gpus * job.days * 24
    return Plan(
        job=job,
        any_failure=rates.any_failure(job.gpus, job.per_gpu_year, job.days),
        any_failure_by_power=None if math.isnan(power) else power,
        expected_failures=rates.expected_failures(job.gpus, job.per_gpu_year, job.days),
        mtbf_s=mtbf,
        spares=rates.spares_for(job.gpus, rates.out_at_once(job.per_gpu_year * job.lost_share, job.repair_s)),
        gpu_hours=hours,
        money=hours * job.price,
        variants=tuple(_variant(name, costs, told, mtbf, hours, job.price, intervals) for name, costs, told in variants),
    )


def scenario(job: Job, costs: Costs, interval_s: float, **more: float) -> Scenario:
    """The job as the simulation wants it; `more` are further fields of Scenario."""
    return Scenario(
        gpus=job.gpus,
        days=job.days,
        per_gpu_year=job.per_gpu_year,
        costs=costs,
        interval_s=interval_s,
        lost_share=job.lost_share,
        repair_s=job.repair_s,
        **more,  # type: ignore[arg-type]
    )


def _variant(name: str, costs: Costs, told: str, mtbf: float, hours: float, price: float, intervals: Sequence[float]) -> Variant:
    best = _row("best", mtbf, yields.best_interval(mtbf, costs.stall_s), costs)
    rows = [_row("asked", mtbf, interval, costs) for interval in intervals]
    rows.append(_row("Young", mtbf, yields.young(mtbf, costs.stall_s), costs))
    rows.append(_row("Daly", mtbf, yields.daly(mtbf, costs.stall_s), costs))
    rows.append(best)
    lost = hours * (1 - best.exact)
    return Variant(name=name, costs=costs, costs_from=told, rows=tuple(rows), best=best, lost_gpu_hours=lost, lost_money=lost * price)


def _row(name: str, mtbf: float, interval: float, costs: Costs) -> Row:
    if math.isinf(interval):  # nothing ever fails: no checkpoint is needed
        return Row(name=name, interval_s=interval, first_order=1.0, exact=1.0)
    return Row(
        name=name,
        interval_s=interval,
        first_order=yields.goodput_first_order(mtbf, interval, costs),
        exact=yields.goodput(mtbf, interval, costs),
    )
