"""The sub-commands that read the record: `goodrun history` and `goodrun runs`."""

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
from .journal import FILE_NAME, read_events
from .runs import RunNotFound, RunSummary, find_run, list_runs, runs_home, summarize

if TYPE_CHECKING:
    from rich.console import Console

JSON_SCHEMA = 1


def history_main(argv: list[str]) -> int:
    """`goodrun history [RUN] [--json]`: the attempts of a run, how each ended and what coming back cost."""
    parser = _parser("history", "Show the attempts of a run: how each ended, what was decided, what coming back cost.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id, its beginning, or its directory; by default the newest run")
    args = parser.parse_args(argv)

    def answer() -> str:
        run_dir = find_run(args.run, runs_home(os.environ), Path.cwd())
        history = fold(read_events(run_dir), gone=summarize(run_dir).outcome == "died")
        if args.json:
            return _json(history_as_dict(history))
        from .history_view import show_history  # rich is slow to import, and the launcher imports this module

        return _drawn(lambda console: show_history(history, console))

    return _run("history", answer)


def runs_main(argv: list[str]) -> int:
    """`goodrun runs [--json]`: all runs that are known here, newest first."""
    args = _parser("runs", "List the runs that are known here, newest first.").parse_args(argv)

    def answer() -> str:
        home = runs_home(os.environ)
        runs = list_runs(home)
        if args.json:
            return _json(runs_as_dict(home, runs))
        from .history_view import show_runs  # as above

        return _drawn(lambda console: show_runs(runs, home, console))

    return _run("runs", answer)


def checkpoints_main(argv: list[str]) -> int:
    """`goodrun checkpoints [DIR] [--verify | --show STEP | --prune N] [--json]`: what lies in a checkpoint directory."""
    parser = _parser("checkpoints", "List the checkpoints of a directory, newest first; status 1 if one of them is damaged.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("checkpoints"), metavar="DIR", help="default: checkpoints")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read every byte and compare it with its checksum")
    what.add_argument("--show", metavar="STEP|PATH", help="list what is in one")
    what.add_argument("--prune", type=int, metavar="N", help="delete all but the newest N whole ones, and what was never committed")
    args = parser.parse_args(argv)
    damaged = False

    def answer() -> str:
        nonlocal damaged
        from . import checkpoints as c  # the launcher imports this module, and has no use for that one

        if args.show is not None:
            one = c.shown(args.directory, args.show)
            return _json({"schema": JSON_SCHEMA, **one}) if args.json else c.contents(one)
        gone = c.pruned(args.directory, args.prune) if args.prune is not None else []
        rows = c.listed(args.directory, verify=args.verify)
        damaged = any(not row["whole"] and row["bytes"] is not None for row in rows)
        if args.json:
            return _json({"schema": JSON_SCHEMA, "directory": str(args.directory), "checkpoints": rows, "deleted": gone})
        return "".join(f"deleted {name}\n" for name in gone) + c.table(rows)

    return _run("checkpoints", answer) or int(damaged)


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"history": history_main, "runs": runs_main, "checkpoints": checkpoints_main}


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


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"goodrun {command}", description=description, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=2) + "\n"


def _drawn(draw: Callable[[Console], None]) -> str:
    """What `draw` puts on a console; caught first, because rich ends the process by itself when a pipe breaks."""
    from rich.console import Console

    from .history_view import NARROWEST

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, NARROWEST)
    with console.capture() as caught:
        draw(console)
    return caught.get()


def _run(command: str, answer: Callable[[], str]) -> int:
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
