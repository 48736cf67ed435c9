"""How a goodput looks on a terminal and in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .account import Goodput
from .advice import advise
from .buckets import Bucket

COLOURS: Mapping[str, str] = {
    "productive": "green", "start-up": "cyan", "data wait": "yellow", "checkpoint stall": "blue", "evaluation": "magenta", "fault": "red",
    "redone work": "bright_red", "idle capacity": "bright_black", "shutdown": "white", "unknown": "bright_black",
}  # fmt: skip
"""The colour of each group of buckets."""
_BAR = 30


def show_goodput(goodput: Goodput, console: Console) -> None:
    """Print it: the three figures, the last minutes, every bucket that is not empty, what to do about it."""
    console.print(headline(goodput))
    console.print(Text(f"{goodput.wall_s:,.1f} s on {_slots(goodput)}: {goodput.slot_s:,.1f} slot-seconds, each in one row"))
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title, justify in (("spent on", "left"), ("slot-s", "right"), ("share", "right"), ("", "left")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, spent in goodput.buckets.items():
        if spent:
            share = spent / goodput.slot_s
            bar = Text("█" * round(share * _BAR) or "▏", style=COLOURS[Bucket(name).group])
            table.add_row(name, f"{spent:,.1f}", f"{100 * share:.1f} %", bar)
    console.print(table)
    if goodput.uploading_s:
        console.print(Text(f"checkpoints were under way to storage for {goodput.uploading_s:,.1f} s while training went on: no loss"))
    if not goodput.redone_known:
        console.print(Text("an attempt did not say which steps it repeated: the redone work may be more"))
    advice = advise(goodput)
    if advice:
        console.print(Text("\nwhat to improve next:", style="bold"))
        for item in advice[:4]:
            console.print(Text(f"  {100 * item.share:4.1f} %  {item.text}"), overflow="fold")


def headline(goodput: Goodput) -> Text:
    """The figures in one line."""
    line = Text.assemble(("goodput ", "bold"), (f"{100 * goodput.time_goodput:.1f} % of the time", "bold green"))
    line.append(f", {100 * goodput.capacity_goodput:.1f} % of the capacity")
    if goodput.between_s:
        line.append(f", ETTR {100 * goodput.ettr:.1f} %")
    past = [f"{100 * w.time_goodput:.0f} % ({w.seconds // 60} min)" for w in goodput.windows if w.seconds < goodput.wall_s]
    if past:
        line.append("; last " + ", ".join(past))
    return line


def goodput_csv(goodput: Goodput) -> str:
    """One row for each bucket, empty ones too."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["bucket", "slot_seconds", "share"])
    for name, spent in goodput.buckets.items():
        writer.writerow([name, f"{spent:.6f}", f"{spent / goodput.slot_s if goodput.slot_s else 0:.6f}"])
    return out.getvalue()


def _slots(goodput: Goodput) -> str:
    slots = goodput.slot_s / goodput.wall_s if goodput.wall_s else 0
    return f"{slots:.3g} slots a node, {goodput.nodes} nodes" if goodput.nodes > 1 else f"{slots:.0f} slots"
