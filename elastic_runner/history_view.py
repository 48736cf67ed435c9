"""How a history and a list of runs look on a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, tzinfo
from pathlib import Path, PurePath

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .history import Attempt, History, Phases
from .runs import RunSummary

NARROWEST = 78  # below this rich would cut columns; a terminal that is narrower breaks the lines itself, and nothing is lost
_WIDE = 120
_OUTCOME_STYLE = {"succeeded": "green", "running": "cyan", "failed": "red", "died": "red", "stopped": "yellow"}
_PHASE_TITLES = {"imports": "import", "first_step": "first step"}


def show_history(history: History, console: Console, tz: tzinfo | None = None) -> None:
    """Print a history; times of day are local, or in `tz`. What does not fit is wrapped; nothing is cut from NARROWEST columns on."""
    _headline(history, console, tz)
    console.print()
    if not history.attempts:
        console.print("no attempt was recorded")
    else:
        console.print(_attempts(history, console.width >= _WIDE, tz))
    recoveries = [(a, a.recovery) for a in history.attempts if a.recovery is not None]
    if recoveries:
        console.print()
        console.print(_recoveries(history, recoveries))
    remarks = list(_remarks(history))
    if remarks:
        console.print()
    for text in remarks:
        console.print(_plain(text), overflow="fold")


def history_csv(history: History) -> str:
    """One row for each attempt; the phases of the recovery that led to it are columns of seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    phases = list(Phases().spent())
    plain = ["life", "attempt", "started_wall", "world_size", "restored_step", "best_step", "steps_redone"]
    plain += ["kind", "cause", "decided", "reason"]
    writer.writerow([*plain, *phases, "recovery_total"])
    for a in history.attempts:
        spent = list(a.recovery.spent().values()) if a.recovery else [""] * len(phases)
        writer.writerow([*(getattr(a, name) for name in plain), *spent, a.recovery.total if a.recovery else ""])
    return out.getvalue()


def show_runs(runs: Sequence[RunSummary], home: Path, console: Console, tz: tzinfo | None = None) -> None:
    """Print a list of runs; where each lies is shown if there is room (`--json` has it always)."""
    if not runs:
        console.print(_plain(f"no run in {home} yet"), soft_wrap=True)
        return
    table = _table("run", "started", "outcome", "restarts", "step", "script", numeric=("restarts", "step"), wrapped=("script",))
    wide = console.width >= _WIDE
    if wide:
        table.add_column("directory", overflow="fold")
    for run in runs:
        cells: list[str | Text] = [
            _plain(run.id),
            _time(run.started, tz, "%Y-%m-%d %H:%M"),
            Text(run.outcome, style=_OUTCOME_STYLE.get(run.outcome, "")),
            str(run.restarts),
            _step(run.step),
            _plain(run.script),
        ]
        if wide:
            cells.append(_plain(run.path))
        table.add_row(*cells)
    console.print(table)


def _headline(history: History, console: Console, tz: tzinfo | None) -> None:
    line = Text.assemble(
        (f"run {_clean(history.run_id) or 'without a name'}", "bold"),
        f"  {_clean(history.script)}  " if history.script else "  ",
        (history.outcome, _OUTCOME_STYLE.get(history.outcome, "")),
    )
    if history.best_step >= 0:
        line.append(f" at step {history.best_step}")
    console.print(line, overflow="fold")
    if history.attempts:
        line = Text(f"started {_time(history.started_wall, tz, '%Y-%m-%d %H:%M:%S')}")
        line.append(f", {_count(history.restarts, 'restart')}")
        line.append(f" in {history.lives} lives" if history.lives > 1 else "")
        line.append(f", {_cost(history)}" if history.restarts else "")
        console.print(line)


def _cost(history: History) -> str:
    redone = sum(a.steps_redone or 0 for a in history.attempts)
    words = f"{_seconds(history.seconds_lost)} s lost: {_seconds(history.recovery_s)} coming back"
    if redone and history.redone_s is not None:
        return f"{words}, {_seconds(history.redone_s)} redoing {_count(redone, 'step')}"
    return f"{words}; and {_count(redone, 'step')} redone" if redone else words


def _attempts(history: History, wide: bool, tz: tzinfo | None) -> Table:
    """One row per attempt, told from left to right: how it came to be, then how it ended."""
    several_lives, shrunk = history.lives > 1, any(a.left_out for a in history.attempts)
    titles = [*(["life"] if several_lives else []), "#", "when", "world", *(["slots\nout"] if shrunk else [])]
    titles += ["from\nstep", *(["checkpoint"] if wide else []), "steps\nredone", "back in\n(s)"]
    titles += ["how it ended", "what was decided"] if wide else ["how it ended -> what was decided"]
    numeric = ("life", "#", "world", "from\nstep", "steps\nredone", "back in\n(s)")
    table = _table(*titles, numeric=numeric, wrapped=("slots\nout", "checkpoint", *titles[-2:][0 if wide else 1 :]))
    for a in history.attempts:
        cells: list[str | Text] = [str(a.life)] if several_lives else []
        cells += [str(a.attempt), _time(a.started_wall, tz, "%H:%M:%S"), str(a.world_size)]
        cells += [", ".join(map(str, a.left_out))] if shrunk else []
        cells += [_step(a.restored_step)]
        cells += [_plain(PurePath(a.restored_from).name)] if wide else []
        cells += ["" if a.steps_redone is None else str(a.steps_redone), _back_in(a.recovery)]
        ended = Text(_clean(a.cause), style={"finished": "green", "running": "cyan"}.get(a.kind, ""))
        decided = _plain(": ".join(filter(None, (a.decided, a.reason if a.decided else ""))))
        if wide:
            cells += [ended, decided]
        else:
            cells.append(Text.assemble(ended, "\n-> ", decided) if decided else ended)
        table.add_row(*cells)
    return table


def _recoveries(history: History, recoveries: Iterable[tuple[Attempt, Phases]]) -> Table:
    titles = {name: _PHASE_TITLES.get(name, name).replace(" ", "\n") for name in Phases().spent()}
    numeric = ("to\n#", *titles.values(), "total")
    table = _table(*numeric, numeric=numeric)
    table.title, table.title_style, table.title_justify = "seconds from each fault to the first new step", "bold", "left"
    for attempt, phases in recoveries:
        name = f"{attempt.life}/{attempt.attempt}" if history.lives > 1 else str(attempt.attempt)
        spent = [_seconds(s) if s else "-" for s in phases.spent().values()]
        table.add_row(name, *spent, _seconds(phases.total) + ("" if phases.finished else "+"))
    if any(not phases.finished for _, phases in recoveries):
        table.caption, table.caption_style, table.caption_justify = "+ no first step came of it (yet)", "", "left"
    return table


def _remarks(history: History) -> Iterator[str]:
    if history.reason and history.outcome != "succeeded":
        yield f"{history.outcome}: {history.reason}"
    failed = next((a for a in reversed(history.attempts) if a.message or a.log), None)
    if failed is not None and history.outcome == "failed":
        yield from filter(None, (failed.message, failed.log and f"log: {failed.log}"))
    if history.chaos_fired:
        yield "chaos fired: " + ", ".join(f"{e.entry} (attempt {e.attempt})" for e in history.chaos_fired)
    if history.chaos_unfired:
        yield "chaos that never fired: " + ", ".join(history.chaos_unfired)
    yield from (f"note: {text}" for text in history.notices)


def _table(*titles: str, numeric: Sequence[str] = (), wrapped: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in titles:
        # columns that may wrap give way first, so that the short ones are never cut
        table.add_column(title, justify="right" if title in numeric else "left", no_wrap=title not in wrapped, overflow="fold")
    return table


def _plain(text: str) -> Text:
    """Text as it is: no markup, and no control character that could take over the terminal."""
    return Text(_clean(text))


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _time(wall: str, tz: tzinfo | None, form: str) -> str:
    try:
        return f"{datetime.fromisoformat(wall).astimezone(tz):{form}}"
    except ValueError:
        return _clean(wall) or "?"


def _step(step: int) -> str:
    return str(step) if step >= 0 else "-"


def _back_in(recovery: Phases | None) -> str:
    if recovery is None:
        return ""
    return _seconds(recovery.total) if recovery.finished else "-"


def _seconds(s: float) -> str:
    return f"{s:.2f}" if s < 10 else f"{s:.1f}" if s < 100 else f"{s:.0f}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
