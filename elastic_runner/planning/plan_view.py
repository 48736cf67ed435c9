"""How a plan looks on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .durations import show_duration
from .plan import Plan, Row, Variant
from .simulation import Estimate


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    job = plan.job
    console.print(Text(f"{job.gpus:,} GPUs for {job.days:g} days: {plan.gpu_hours:,.0f} GPU-hours{_money(plan.money)}", style="bold"))
    console.print(Text(f"{job.per_gpu_year:.3g} failures per GPU and year; {job.source}"), overflow="fold")
    console.print()
    for line in _failures(plan):
        console.print(Text(line), overflow="fold")
    for variant in plan.variants:
        console.print()
        title = {"goodrun": "with goodrun", "without": "without"}.get(variant.name, variant.name)
        costs = variant.costs
        line = f" (costs {variant.costs_from}): {show_duration(costs.detect_s)} to detect, {show_duration(costs.recover_s)} to recover, "
        line += f"{show_duration(costs.stall_s)} stall per checkpoint, {show_duration(costs.durable_s)} until durable"
        console.print(Text.assemble((title, "bold"), line), overflow="fold")
        console.print(_rows(variant))
        console.print(Text(f"at the best interval {variant.lost_gpu_hours:,.0f} GPU-hours are lost{_money(variant.lost_money)}"))
    if len(plan.variants) == 2:
        won = plan.variants[1].lost_gpu_hours - plan.variants[0].lost_gpu_hours
        money = plan.variants[1].lost_money - plan.variants[0].lost_money
        console.print()
        console.print(Text(f"difference: {won:,.0f} GPU-hours{_money(money)}", style="bold"))
    for line in _simulation(plan):
        console.print(Text(line), overflow="fold")


def _failures(plan: Plan) -> Iterator[str]:
    chance = f"{_percent(plan.any_failure)} chance of at least one failure"
    if plan.any_failure_by_power is not None and _percent(plan.any_failure_by_power) != _percent(plan.any_failure):
        chance += f" ({_percent(plan.any_failure_by_power)} as 1-(1-a)^NT)"
    yield (
        f"{chance}; {plan.expected_failures:,.3g} expected"
        if plan.expected_failures < 100
        else (f"{chance}; {plan.expected_failures:,.0f} expected")
    )
    yield f"{show_duration(plan.mtbf_s)} between failures, on the mean"
    job = plan.job
    share = "every failure needs" if job.lost_share == 1 else f"{job.lost_share:.0%} of the failures need"
    yield f"{plan.spares} spare GPUs are enough 99 % of the time ({share} a repair of {show_duration(job.repair_s)})"


def _rows(variant: Variant) -> Table:
    simulated = any(row.simulated for row in variant.rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    titles = ["interval", "", "goodput", "1st order", *(["simulated", "of capacity"] if simulated else [])]
    for title in titles:
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    seen: dict[str, Row] = {}
    names: dict[str, list[str]] = {}
    for row in variant.rows:  # the three formulas often agree to the digit that is shown
        key = f"{show_duration(row.interval_s)} {row.exact:.3f}"
        names.setdefault(key, []).append(row.name)
        seen[key] = row
    for key, row in seen.items():
        name = ", ".join(n for n in names[key] if n != "asked")
        cells = [show_duration(row.interval_s), name, _percent(row.exact), _percent(row.first_order)]
        if simulated:
            s = row.simulated
            cells += [_estimate(s.time_goodput), _estimate(s.capacity_goodput)] if s else ["", ""]
        table.add_row(*cells, style="bold" if row.name == "best" else "")
    return table


def _simulation(plan: Plan) -> Iterator[str]:
    for variant in plan.variants:
        for row in variant.rows:
            if (s := row.simulated) is None:
                continue
            yield ""
            yield f"simulated ({variant.name}, every {show_duration(row.interval_s)}): {s.replicas:,} jobs, seed {s.seed}; ± standard error"
            yield f"  at least one failure in {_estimate(s.any_failure)} of them; {_plain(s.failures)} failures a job"
            if math.isfinite(s.mtbf_s.mean):
                yield f"  {show_duration(s.mtbf_s.mean)} ± {show_duration(s.mtbf_s.error)} between failures; {_plain(s.restarts)} restarts"
            yield f"  the smallest world was {s.smallest:,}; the policy gave up {_plain(s.gave_up)} times a job"
            return  # the failures do not depend on the costs


def _estimate(e: Estimate) -> str:
    if math.isnan(e.error):
        return _percent(e.mean)
    digits = 2 if e.error < 0.001 else 1
    return f"{100 * e.mean:.{digits}f} ± {100 * e.error:.{digits}f} %"


def _plain(e: Estimate) -> str:
    return f"{e.mean:,.3g}" + ("" if math.isnan(e.error) else f" ± {e.error:,.2g}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _money(amount: float) -> str:
    return f" (a price of {amount:,.0f})" if amount else ""
