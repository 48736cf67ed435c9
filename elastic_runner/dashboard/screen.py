"""How a board looks on a terminal of a given size."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from ..goodput.account import Goodput
from ..goodput.buckets import Bucket
from ..goodput.view import COLOURS
from ..planning.durations import show_duration
from .board import Board
from .ranks import RankRow

WIDE = 120
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLE = {
    "training": "bold green", "succeeded": "bold green", "recovering": "bold yellow", "starting": "cyan", "stopping": "yellow",
    "failed": "bold red", "died": "bold red",
}  # fmt: skip
_HEALTH_STYLE = {"ok": "green", "slow": "yellow", "hung": "bold red", "gone": "bold red"}


def screen(board: Board, width: int, height: int, *, footer: str = "", log: Sequence[str] = (), scroll: int = 0) -> Group:
    """The whole picture, at most `height` lines of `width` columns. `log`: what the failed rank wrote last; `scroll`: attempts skipped."""
    goodput = board.goodput
    lines = [_title(board, goodput, width), *_goodput_lines(goodput, width), *_pace(board, width)]
    room = max(height - len(lines) - bool(footer), 0)
    if width >= WIDE:
        half = (width - 3) // 2
        left = [*_ranks(board, room - 1), _checkpoints(board)]
        upper = max(room // 2, 4)
        right = [*_restarts(board, upper, scroll), *_log(board, log, room - upper)]
        lines += _beside(left[:room], right[:room], half)
    else:
        restarts = min(len(board.history.attempts) + 1, max(room // 3, 3))
        of_log = min(len(log) + 1, max(room // 4, 2)) if log else 0
        middle = [*_ranks(board, max(room - 1 - restarts - of_log, 2)), _checkpoints(board)]
        lines += [*middle, *_restarts(board, restarts, scroll), *_log(board, log, of_log)]
    lines = lines[: height - bool(footer)]
    if footer:
        lines.append(Text(footer, style="dim"))
    return Group(*(_cut(line, width) for line in lines))


def _beside(left: list[Text], right: list[Text], half: int) -> list[Text]:
    """Two columns as lines."""
    lines = []
    for i in range(max(len(left), len(right))):
        line = _cut(left[i], half) if i < len(left) else Text()
        line.pad_right(half + 3 - len(line))
        lines.append(line + right[i] if i < len(right) else line)
    return lines


def _title(board: Board, goodput: Goodput, width: int) -> Text:
    line = Text.assemble((f"{os.path.basename(board.run.script) or 'run'}  ", "bold"))
    line.append(board.state, style=_STATE_STYLE.get(board.state, ""))
    asked, here = len(board.run.slots), len(board.slots)
    line.append(f"  world {board.world_size}" + (f" of {asked}" if here == board.world_size != asked else ""))
    line.append(f"  step {board.step}" if board.step >= 0 else "")
    restarts = f"{board.history.restarts} restart" + ("" if board.history.restarts == 1 else "s")
    line.append(f"  {restarts}, {show_duration(goodput.wall_s)}  {board.run.run_id}", style="dim")
    return line


def _goodput_lines(goodput: Goodput, width: int) -> list[Text]:
    line = Text.assemble("goodput ", (f"{100 * goodput.time_goodput:.1f} %", "bold green"))
    line.append(f", of capacity {100 * goodput.capacity_goodput:.1f} %;")
    line.append("".join(f"  {w.seconds // 60} min {100 * w.time_goodput:.0f} %" for w in goodput.windows))
    lost = Text.assemble(("lost to ", "dim"))
    for i, (group, spent) in enumerate(_largest(goodput)):
        lost.append(", " if i else "", style="dim")
        lost.append(f"{group} {100 * spent / goodput.slot_s:.1f} %", style=COLOURS[group])
    bar, before = Text(), 0.0
    for group, spent in goodput.groups().items():
        end = before + width * spent / (goodput.slot_s or 1.0)
        bar.append("█" * (round(end) - round(before)), style=COLOURS[group])
        before = end
    return [line, lost if len(lost) > 8 else Text("nothing lost yet", style="dim"), bar]


def _largest(goodput: Goodput) -> list[tuple[str, float]]:
    lost = [(group, spent) for group, spent in goodput.groups().items() if spent > 0 and group != Bucket.PRODUCTIVE.value]
    return sorted(lost, key=lambda item: -item[1])[:4]


def _pace(board: Board, width: int) -> list[Text]:
    """Steps a second over the whole run, with a mark under each fault."""
    label = 20
    steps, faults = board.pace(max(width - label, 8))
    most = max(steps, default=0.0)
    if not most:
        return [Text("no step yet", style="dim")]
    bars, marks = Text(), Text(" " * label)
    bars.append(f"{most:8.2f} steps/s max ".rjust(label)[:label], style="dim")
    for value, fault in zip(steps, faults, strict=True):
        bars.append(_BARS[min(int(value / most * 8), 7)] if value else " ", style="green")
        marks.append("×" if fault else " ", style="bold red")
    return [bars, marks]


def _ranks(board: Board, room: int) -> list[Text]:
    rows = board.ranks()
    if not rows or room < 2:
        return [Text("no ranks yet", style="dim")]
    shown = rows if len(rows) <= room - 1 else sorted(rows, key=_badness)[: max(room - 2, 1)]
    several = len({r.node for r in rows}) > 1
    titles = f"{'rank':>5} {'slot':>4} {'step':>9} {'s/step':>8} {'data wait':>9} {'silent':>8}  {'doing':<8}health"
    lines = [Text(f"{titles}    node" if several else titles, style="dim")]
    for r in shown:
        step, step_s = str(r.step) if r.step >= 0 else "-", f"{r.step_s:.3g}" if r.step_s else "-"
        waits = f"{100 * r.data_share:.0f} %" if r.data_share >= 0 else "-"
        line = Text(f"{r.rank:>5} {r.slot:>4} {step:>9} {step_s:>8} {waits:>9} {r.silent_s:>6.1f} s  {r.phase:<8}")
        line.append(f"{r.health:<8}" if several else r.health, style=_HEALTH_STYLE.get(r.health, ""))
        line.append(f"  {r.node}" if several else "")
        lines.append(line)
    more = len(rows) - len(shown)
    return [*lines, *([Text(f"and {more} more, none of them worse", style="dim")] if more else [])]


def _badness(r: RankRow) -> tuple[bool, float, float, int]:
    return (r.health == "ok", -r.silent_s, -r.data_share, r.rank)


def _checkpoints(board: Board) -> Text:
    saved, durable = board.checkpoints
    line = Text.assemble(("checkpoint ", "dim"))
    line.append(f"step {durable} durable" if durable >= 0 else "none durable yet")
    if board.saved.trouble:
        line.append(f"; {board.saved.trouble}", style="red")
    elif (upload := board.saved.upload) is not None and upload.total:
        how_far = f"{100 * upload.done / upload.total:.0f} % of {upload.total / 1e6:,.0f} MB"
        line.append(f", step {upload.step} under way to storage: {how_far}", style="yellow")
    elif saved > durable:
        line.append(f", step {saved} under way to storage", style="yellow")
    if (unsaved := board.saved.unsaved) is not None and unsaved.fate in ("skipped", "replaced"):
        line.append(f", step {unsaved.step} {unsaved.fate}: storage is slower than the cadence", style="yellow")
    return line


def _restarts(board: Board, room: int, scroll: int) -> list[Text]:
    attempts = list(reversed(board.history.attempts))
    scroll = min(scroll, max(len(attempts) - 1, 0))
    lines = [Text(f"attempts, newest first{f' ({scroll} skipped)' if scroll else ''}", style="dim")]
    for a in attempts[scroll : scroll + max(room - 1, 1)]:
        line = Text.assemble((f"#{a.attempt} ", "bold"))
        if a.recovery is not None and a.recovery.finished:
            line.append(f"back in {show_duration(a.recovery.total)}, ")
        line.append(f"{a.world_size} ranks")
        line.append(f" from step {a.restored_step}" if a.restored_step >= 0 else "")
        style = {"running": "cyan", "finished": "green"}.get(a.kind, "red")
        line.append(f": {a.cause}", style=style)
        line.append(f" -> {a.decided}" if a.decided else "")
        lines.append(line)
    return lines


def _log(board: Board, log: Sequence[str], room: int) -> list[Text]:
    if not log or board.failed is None or room < 2:
        return []
    title = Text(f"last lines of rank {board.failed.rank}, which failed first", style="dim")
    return [title, *(Text(line, style="red") for line in log[-(room - 1) :])]


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line
