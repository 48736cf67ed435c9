"""`goodrun plan`: from the size of a job to its failures, its checkpoint interval and its goodput."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..events import Event
from .durations import parse_duration
from .plan import GOODRUN, STOCK, Job, Plan, Variant, make_plan, scenario
from .rates import PRESETS, YEAR_S
from .simulation import simulate
from .yields import Costs

if TYPE_CHECKING:
    from rich.console import Console

JSON_SCHEMA = 1


def parser() -> argparse.ArgumentParser:
    """The options of `goodrun plan`."""
    p = argparse.ArgumentParser(
        prog="goodrun plan",
        description="Say what failures a job of a given size will meet, how often it should save, and what goodput it can expect.",
        allow_abbrev=False,
    )
    p.add_argument("--gpus", type=_count, required=True, metavar="N", help="GPUs of the job")
    p.add_argument("--days", type=_positive, default=30.0, metavar="D", help="how long it runs (default 30)")
    rate = p.add_mutually_exclusive_group()
    rate.add_argument("--preset", choices=sorted(PRESETS), default="llama3", help="a published failure rate (default llama3)")
    rate.add_argument("--afr", type=_positive, metavar="RATE", help="failures per GPU and year: 0.01 is 1 %%")
    rate.add_argument("--failures-per-day", type=_positive, metavar="X", help="failures of the whole job in a day")
    rate.add_argument("--mtbf", type=_duration, metavar="TIME", help="mean time between failures of the whole job")
    p.add_argument("--interval", type=_duration, action="append", default=[], metavar="TIME", help="an interval to look at (repeatable)")
    p.add_argument("--costs", type=_costs_over(GOODRUN), metavar="LIST", help=f"with goodrun (default {_listed(GOODRUN)})")
    p.add_argument("--stock-costs", type=_costs_over(STOCK), default=STOCK, metavar="LIST", help=f"without (default {_listed(STOCK)})")
    p.add_argument("--from", dest="from_run", metavar="RUN", help="take goodrun's costs from a recorded run; --costs beats it")
    p.add_argument("--repair", type=_duration, default=86400.0, metavar="TIME", help="how long a failed GPU is away (default 1d)")
    p.add_argument("--lost-share", type=_share, metavar="X", help="share of failures that need a repair (default: the preset's, else 1)")
    p.add_argument("--price", type=_positive, default=0.0, metavar="P", help="of a GPU-hour, in any currency")
    p.add_argument("--simulate", action="store_true", help="simulate each interval too, with goodrun's own policy deciding")
    p.add_argument("--seed", type=int, default=0, help="of the simulation (default 0)")
    p.add_argument("--replicas", type=_count, metavar="N", help="simulated jobs (default: as many as keep the error small)")
    p.add_argument("--spares", type=_natural, metavar="N", help="GPUs in reserve in the simulation (default: those for 99 %%)")
    p.add_argument("--min-gpus", type=_count, default=1, metavar="N", help="the fewest that the simulated job goes on with (default 1)")
    p.add_argument("--multiple-of", type=_count, default=1, metavar="K", help="its size stays a multiple of K (default 1)")
    p.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="GPUs of a node (default 8)")
    p.add_argument("--node-share", type=_share, default=0.0, metavar="X", help="share of the lost GPUs that take their whole node along")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw goodput against interval and size, as SVG")
    p.add_argument("--json", action="store_true", help="print the same as JSON")
    return p


def plan_for(args: argparse.Namespace, read_run: Callable[[str], Iterable[Event]]) -> Plan:
    """The plan that the options ask for, simulated if they ask for that."""
    job = _job(args)
    costs, told = args.costs or GOODRUN, "as given" if args.costs else "assumed"
    if args.from_run is not None and not args.costs:
        from .measured import costs_of

        costs, told = costs_of(read_run(args.from_run), GOODRUN)
    stock_told = "assumed" if args.stock_costs == STOCK else "as given"
    plan = make_plan(job, [("goodrun", costs, told), ("without", args.stock_costs, stock_told)], args.interval)
    if not args.simulate:
        return plan
    return replace(plan, variants=tuple(_simulated(plan, v, args) for v in plan.variants))


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan in JSON's own types; what is infinite or unknown is null."""
    body: dict[str, Any] = _finite({"schema": JSON_SCHEMA, **asdict(plan)})
    return body


def show(plan: Plan, console: Console) -> None:
    """Print a plan for people."""
    from .plan_view import show_plan  # rich is slow to import

    show_plan(plan, console)


def to_json(plan: Plan) -> str:
    """The plan as one JSON text."""
    return json.dumps(plan_as_dict(plan), indent=2) + "\n"


def _job(args: argparse.Namespace) -> Job:
    preset = PRESETS[args.preset]
    rate, source, lost = preset.per_gpu_year, f"{preset.name}: {preset.source}", preset.lost_share
    if args.afr is not None:
        rate, source, lost = args.afr, "as given with --afr", 1.0
    elif args.failures_per_day is not None:
        rate, source, lost = args.failures_per_day * 365 / args.gpus, "as given with --failures-per-day", 1.0
    elif args.mtbf is not None:
        if args.mtbf <= 0:
            raise ValueError("--mtbf must be longer than nothing")
        rate, source, lost = YEAR_S / args.mtbf / args.gpus, "as given with --mtbf", 1.0
    return Job(
        gpus=args.gpus,
        days=args.days,
        per_gpu_year=rate,
        source=source,
        lost_share=lost if args.lost_share is None else args.lost_share,
        repair_s=args.repair,
        price=args.price,
    )


def _simulated(plan: Plan, variant: Variant, args: argparse.Namespace) -> Variant:
    """The variant with a simulation beside each interval that was asked for, or beside the best."""
    rows = []
    for row in variant.rows:
        if (row.name == "asked" or (row.name == "best" and not args.interval)) and math.isfinite(row.interval_s):
            case = scenario(
                plan.job,
                variant.costs,
                row.interval_s,
                spares=plan.spares if args.spares is None else args.spares,
                min_gpus=args.min_gpus,
                multiple_of=args.multiple_of,
                gpus_per_node=args.gpus_per_node,
                node_share=args.node_share,
            )
            row = replace(row, simulated=simulate(case, seed=args.seed, replicas=args.replicas, progress=_ticker(args.json)))
        rows.append(row)
    return replace(variant, rows=tuple(rows), best=next(r for r in rows if r.name == "best"))


def _ticker(quiet: bool) -> Callable[[int], None] | None:
    if quiet or not os.isatty(2):
        return None

    def tick(done: int) -> None:
        sys.stderr.write(f"\r{done} simulated\x1b[K")

    return tick


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _costs_over(base: Costs) -> Callable[[str], Costs]:
    names = [f.name.removesuffix("_s") for f in fields(Costs)]

    def parse(text: str) -> Costs:
        given = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is no cost: there are {', '.join(names)}, as in detect=10s,stall=2s")
            given[f"{name}_s"] = _duration(value)
        return replace(base, **given)

    return parse


def _listed(costs: Costs) -> str:
    return ",".join(f"{f.name.removesuffix('_s')}={getattr(costs, f.name):g}s" for f in fields(Costs))


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _positive(text: str) -> float:
    return _number(text, 1e-12, math.inf, "a number above 0")


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0, "a share between 0 and 1")


def _count(text: str) -> int:
    return int(_whole(text, 1))


def _natural(text: str) -> int:
    return int(_whole(text, 0))


def _whole(text: str, low: int) -> float:
    value = _number(text, low, 1e7, f"a whole number from {low} on")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return value


def main(argv: Sequence[str], home: Callable[[], Path], answer: Callable[[Callable[[], str]], int], draw: Callable[..., str]) -> int:
    """Parse, plan, print; how runs are found and answers printed is the caller's."""
    from ..journal import read_events
    from ..runs import find_run

    p = parser()
    args = p.parse_args(argv)

    def text() -> str:
        plan = plan_for(args, lambda run: read_events(find_run(run, home(), Path.cwd())))
        if args.plot is not None:
            from .plot import plot

            args.plot.write_text(plot(plan), encoding="utf-8")
        return to_json(plan) if args.json else draw(lambda console: show(plan, console))

    return answer(text)
