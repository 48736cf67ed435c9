"""The sub-commands that start nothing: `goodrun history`, `goodrun plan`, `goodrun runs`."""

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


def plan_main(argv: list[str]) -> int:
    """`goodrun plan --gpus N …`: what failures a job will meet, and what is left of the time."""
    from .planning.command import main

    return main(argv, lambda: runs_home(os.environ), lambda answer: _run("plan", answer), _drawn)


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"history": history_main, "plan": plan_main, "runs": runs_main}


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
    except (RunNotFound, ValueError, OSError) as error:
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
