"""The sub-commands that start nothing: `goodrun history`, `goodrun goodput`, `goodrun plan` and others."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import CheckpointError
from .history import History, fold
from .journal import FILE_NAME
from .merging import read_job
from .runs import RunNotFound, RunSummary, find_run, list_runs, runs_home, summarize
from .slurm_script import slurm_script_main
from .story import told_as_one

if TYPE_CHECKING:
    from rich.console import Console

JSON_SCHEMA = 1


def history_main(argv: list[str]) -> int:
    """`goodrun history [RUN] [--json | --csv]`: the attempts of a run, how each ended and what coming back cost."""
    parser = parser_of_run("history", "Show the attempts of a run: how each ended, what was decided, what coming back cost.", csv=True)
    args = parser.parse_args(argv)

    def answer() -> str:
        run_dir = find_run(args.run, runs_home(os.environ), Path.cwd())
        history = fold(told_as_one(read_job(run_dir)), gone=summarize(run_dir).outcome == "died")
        if args.json:
            return _json(history_as_dict(history))
        from .history_view import history_csv, show_history  # rich is slow to import, and the launcher imports this module

        if args.csv:
            return history_csv(history)
        return drawn(lambda console: show_history(history, console))

    return answered("history", answer)


def runs_main(argv: list[str]) -> int:
    """`goodrun runs [--json]`: all runs that are known here, newest first."""
    args = _parser("runs", "List the runs that are known here, newest first.").parse_args(argv)

    def answer() -> str:
        home = runs_home(os.environ)
        runs = list_runs(home)
        if args.json:
            return _json(runs_as_dict(home, runs))
        from .history_view import show_runs  # as above

        return drawn(lambda console: show_runs(runs, home, console))

    return answered("runs", answer)


def goodput_main(argv: list[str]) -> int:
    """`goodrun goodput [RUN] [--json | --csv]`: where the time went."""
    from .goodput.command import main

    return main(argv)


def report_main(argv: list[str]) -> int:
    """`goodrun report [RUN] [-o FILE]`: the run as a page of HTML."""
    from .report.command import main

    return main(argv)


def top_main(argv: list[str]) -> int:
    """`goodrun top [RUN]`: a run as it stands."""
    from .dashboard.command import main

    return main(argv)


def chaos_main(argv: list[str]) -> int:
    """`goodrun chaos [--list] [PLAN]`: the kinds of faults there are, or what a plan would do."""
    from ..fault_injection import parse_plan
    from ..fault_injection.telling import kinds_told, plan_told

    parser = argparse.ArgumentParser(prog="goodrun chaos", description="Show what --chaos can do, or what a plan would do.")
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="what --chaos would be given; without it, all kinds of faults are listed")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults")
    args = parser.parse_args(argv)

    def answer() -> str:
        return f"{kinds_told() if args.list or args.plan is None else plan_told(parse_plan(args.plan))}\n"

    return answered("chaos", answer)


def devices_main(argv: list[str]) -> int:
    """`goodrun devices`: this node's GPUs, their health now, and those set aside."""
    from .devices.command import main

    return main(argv)


def plan_main(argv: list[str]) -> int:
    """`goodrun plan --gpus N …`: what failures a job will meet, and what is left of the time."""
    from .planning.command import main

    return main(argv, lambda: runs_home(os.environ), lambda answer: answered("plan", answer), drawn)


def checkpoints_main(argv: list[str]) -> int:
    """`goodrun checkpoints [DIR|URL] [--verify | --show STEP | --prune N] [--json]`: what lies in a checkpoint directory."""
    if argv[:1] == ["upload"]:
        return _upload_main(argv[1:])
    parser = _parser("checkpoints", "List the checkpoints of a directory, newest first; status 1 if one of them is damaged.")
    parser.add_argument("directory", nargs="?", default="checkpoints", metavar="DIR|URL", help="default: checkpoints")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read every byte and compare it with its checksum")
    what.add_argument("--show", metavar="STEP|PATH", help="list what is in one")
    what.add_argument("--prune", type=int, metavar="N", help="delete all but the newest N whole ones, and what was never committed")
    args = parser.parse_args(argv)
    damaged = False

    def answer() -> str:
        nonlocal damaged
        from ..checkpoint.places import located  # the launcher imports this module, and has no use for those two
        from . import checkpoints as c

        directory = located(args.directory)
        if args.show is not None:
            one = c.shown(directory, args.show)
            return _json({"schema": JSON_SCHEMA, **one}) if args.json else c.contents(one)
        gone = c.pruned(directory, args.prune) if args.prune is not None else []
        rows = c.listed(directory, verify=args.verify)
        damaged = any(not row["whole"] and row["bytes"] is not None for row in rows)
        if args.json:
            return _json({"schema": JSON_SCHEMA, "directory": str(args.directory), "checkpoints": rows, "deleted": gone})
        return "".join(f"deleted {name}\n" for name in gone) + c.table(rows)

    return answered("checkpoints", answer) or int(damaged)


def _upload_main(argv: list[str]) -> int:
    """`goodrun checkpoints upload PATH URL`: bring one checkpoint to another place."""
    parser = _parser("checkpoints upload", "Copy one checkpoint to another place, its commit mark last.")
    parser.add_argument("path", type=Path, metavar="PATH", help="the checkpoint: a directory step-…")
    parser.add_argument("target", metavar="URL|DIR", help="where the script's Checkpointer keeps its checkpoints")
    args = parser.parse_args(argv)

    def answer() -> str:
        from ..checkpoint.places import located
        from . import checkpoints as c

        where, missing = c.uploaded(args.path, located(args.target))
        if args.json:
            return _json({"schema": JSON_SCHEMA, "uploaded": where, "missing_ranks": missing})
        more = f"it is whole once the parts of ranks {', '.join(map(str, missing))} are there: upload them from their nodes\n"
        return f"uploaded: {where}\n" + (more if missing else "")

    return answered("checkpoints", answer)


def verdict_main(argv: list[str]) -> int:
    """`goodrun verdict DIR [--json]`: what a rehearsal came to."""
    from .verdict.command import main

    return main(argv)


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {
    "checkpoints": checkpoints_main,
    "chaos": chaos_main,
    "devices": devices_main,
    "goodput": goodput_main,
    "history": history_main,
    "plan": plan_main,
    "report": report_main,
    "runs": runs_main,
    "slurm-script": slurm_script_main,
    "top": top_main,
    "verdict": verdict_main,
}


def history_as_dict(history: History) -> dict[str, Any]:
    """The history in JSON's own types: the dataclasses' field names are the keys, and each recovery has its `total`."""
    body = asdict(history)
    for attempt, plain in zip(history.attempts, body["attempts"], strict=True):
        if attempt.recovery is not None:
            plain["recovery"]["total"] = attempt.recovery.total
    return {"schema": JSON_SCHEMA, **body}


def runs_as_dict(home: Path, runs: list[RunSummary]) -> dict[str, Any]:
    """The list of runs in JSON's own types."""
    return {"schema": JSON_SCHEMA, "home": str(home), "runs": [asdict(run) for run in runs]}


def parser_of_run(command: str, description: str, *, csv: bool = False) -> argparse.ArgumentParser:
    """The options of a sub-command that reads one run."""
    parser = _parser(command, description, csv=csv)
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id, its beginning, or its directory; by default the newest run")
    return parser


def _parser(command: str, description: str, *, csv: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"goodrun {command}", description=description, allow_abbrev=False)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the same as JSON")
    if csv:
        form.add_argument("--csv", action="store_true", help="print a table for a spreadsheet")
    return parser


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=2) + "\n"


def drawn(draw: Callable[[Console], None]) -> str:
    """What `draw` puts on a console; caught first, because rich ends the process by itself when a pipe breaks."""
    from rich.console import Console

    from .history_view import NARROWEST

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, NARROWEST)
    with console.capture() as caught:
        draw(console)
    return caught.get()


def answered(command: str, answer: Callable[[], str]) -> int:
    """Print the answer, or in words why there is none; returns the exit status."""
    try:
        text = answer()
    except (RunNotFound, CheckpointError, ValueError, OSError) as error:
        what = f"cannot read {error.filename or FILE_NAME}: {error.strerror or error}" if isinstance(error, OSError) else error
        print(f"goodrun {command}: {what}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a cause may hold what the terminal's encoding lacks
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `goodrun runs | head`: the reader has had enough; so that the interpreter's own flush at exit is silent too:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
