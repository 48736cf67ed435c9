"""The picture of a plan: goodput against the checkpoint interval, for this job and for smaller and larger ones."""

from __future__ import annotations

import math

from ..drawing import PALETTE, Chart
from .durations import show_duration
from .plan import Plan
from .rates import mtbf_s
from .yields import goodput

_SHORTEST_S, _LONGEST_S = 10.0, 12 * 3600.0


def plot(plan: Plan) -> str:
    """An SVG file: solid with goodrun's costs, dashed without; dots were simulated."""
    chart = Chart(width=760, height=460, x=(_SHORTEST_S, _LONGEST_S), y=(0.0, 1.0), log_x=True, right=150)
    x_ticks = [(s, show_duration(s)) for s in (10, 30, 60, 300, 900, 3600, 4 * 3600, 12 * 3600)]
    chart.axes(x_ticks, [(y / 10, f"{10 * y} %") for y in range(0, 11, 2)], "computing between two checkpoints", "goodput")
    points = [_SHORTEST_S * (_LONGEST_S / _SHORTEST_S) ** (i / 80) for i in range(81)]
    sizes = [s for s in (plan.job.gpus // 8, plan.job.gpus, plan.job.gpus * 8) if s >= 1]
    for i, size in enumerate(sizes):
        mtbf, colour = mtbf_s(size, plan.job.per_gpu_year), PALETTE[i]
        for variant in plan.variants:
            values = [(x, goodput(mtbf, x, variant.costs)) for x in points]
            chart.line(values, colour, dashed=variant.name != "goodrun")
        chart.text(chart.width - chart.right + 8, 50 + 20 * i, f"{size:,} GPUs", colour=colour)
    for variant in plan.variants:
        for row in variant.rows:
            if row.simulated and _SHORTEST_S <= row.interval_s <= _LONGEST_S:
                mean, error = row.simulated.time_goodput.mean, row.simulated.time_goodput.error
                words = f"{variant.name}: simulated {mean:.2%}" + ("" if math.isnan(error) else f" ± {error:.2%}")
                chart.dot(row.interval_s, mean, PALETTE[sizes.index(plan.job.gpus)], words)
    below = 50 + 20 * len(sizes) + 10
    for i, words in enumerate(("solid: with goodrun", "dashed: without", "dots: simulated")):
        chart.text(chart.width - chart.right + 8, below + 18 * i, words)
    return chart.svg(label=f"goodput against checkpoint interval for {plan.job.gpus} GPUs")
