"""`goodrun report`: reads a run's record and writes the page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import events as ev
from ..dashboard.board import Board
from ..events import Event
from ..goodput.command import goodput_as_dict
from ..goodput.ledger import Ledger
from ..history import fold
from ..merging import read_job
from ..runs import find_run, runs_home, summarize
from ..story import told_as_one
from .page import page
from .timeline import timeline

_MOST_MARKS = 400


def main(argv: list[str]) -> int:
    """`goodrun report [RUN] [-o FILE]`."""
    from ..reading import answered, parser_of_run

    parser = parser_of_run("report", "Write a run's story and its goodput as one page of HTML that needs nothing else.")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="where to (default report.html)")
    args = parser.parse_args(argv)

    def answer() -> str:
        run_dir = find_run(args.run, runs_home(os.environ), Path.cwd())
        events = read_job(run_dir)
        gone = summarize(run_dir).outcome == "died"
        if args.json:
            board = Board().extend(events)
            return json.dumps({"schema": 1, "run_id": board.run.run_id, "goodput": goodput_as_dict(board.goodput)}, indent=2) + "\n"
        args.output.write_text(report(events, gone=gone), encoding="utf-8")
        return f"{args.output}: {args.output.stat().st_size / 1024:.0f} KiB\n"

    return answered("report", answer)


def report(events: Sequence[Event], *, gone: bool = False) -> str:
    """The page of a run. `gone`: its launcher is known to live no more."""
    board = Board().extend(events)
    history = fold(told_as_one(events), gone=gone)
    nodes: dict[str, list[Event]] = {}
    for e in events:
        nodes.setdefault(e.node, []).append(e)
    timelines = []
    for node, told in nodes.items():
        ledger, faults, saved = _marked(told)
        timelines.append((node, timeline(ledger.settled().pieces, _some(faults), _some(saved))))
    pace, _ = board.pace(200)
    return page(board.run, history, board.goodput, timelines, pace, board.losses, history.notices)


def _marked(events: Iterable[Event]) -> tuple[Ledger, list[tuple[float, str]], list[tuple[float, str]]]:
    """One node's ledger, and the moments of its faults and of its durable checkpoints, in seconds since the run began."""
    ledger, faults, saved, durable = Ledger(), [], [], -1
    for e in events:
        ledger.add(e)
        now = ledger.newest_us / 1e6
        if isinstance(e, ev.Failed):
            faults.append((now - max(e.t - e.fault_t, 0.0) if e.fault_t else now, e.cause))
        elif isinstance(e, ev.SaveEnded) and e.fate == "durable":
            durable = max(durable, e.step)
            saved.append((now, f"step {e.step} durable, {e.seconds:.2f} s after it was taken"))
        elif isinstance(e, ev.RankProgress) and e.durable_step > durable:
            durable = e.durable_step
            saved.append((now, f"step {durable} durable"))
        elif isinstance(e, ev.AttemptStarted):
            durable = -1
    return ledger, faults, saved


def _some(marks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """All of them, or evenly chosen ones where there are too many to be seen."""
    return marks[:: len(marks) // _MOST_MARKS + 1]
