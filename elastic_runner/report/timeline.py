"""The picture of a run: slots from top to bottom, time from left to right, coloured by what they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..drawing import Chart, nice_ticks
from ..goodput.book import Piece
from ..goodput.buckets import Bucket
from ..planning.durations import show_duration

COLOURS = {
    "productive": "#2a9d6f", "start-up": "#3aa0c9", "data wait": "#e0b400", "checkpoint stall": "#4f6bd8", "evaluation": "#a45fc4",
    "fault": "#d63c4a", "redone work": "#f08a4b", "idle capacity": "#9aa0a6", "shutdown": "#6b7280", "unknown": "#c4c7cc",
}  # fmt: skip
"""The colour of each group of buckets."""
Run = tuple[float, float, tuple[tuple[str, float], ...]]
"""From which pixel to which a slot did what: groups with their shares, from top to bottom."""
_WIDTH, _ROWS_SHOWN, _THIN_PX = 1000, 64, 0.4
_IDLE = ((Bucket.IDLE.group, 1.0),)


def timeline(pieces: Sequence[Piece], faults: Iterable[tuple[float, str]], checkpoints: Iterable[tuple[float, str]]) -> str:
    """One node's slots over the seconds of the run. `faults` and `checkpoints` are moments, in seconds, with words for the mouse."""
    end_s = pieces[-1].end / 1e6 if pieces else 1.0
    slots = sorted({s for p in pieces for s in (*p.active, *p.idle)})[:_ROWS_SHOWN]
    row = 22 if len(slots) <= 8 else 12 if len(slots) <= 32 else 7
    chart = Chart(width=_WIDTH, height=len(slots) * row + 60, x=(0.0, end_s or 1.0), y=(0.0, 1.0), left=56, right=14, top=30, bottom=28)
    unit, size = next((u, s) for u, s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)) if end_s > 3 * s or s == 1.0)
    ticks = [(v * size, f"{v:g} {unit}") for v in nice_ticks(0, end_s / size, 8)]
    chart.axes(ticks, [])
    top = chart.top
    for i, slot in enumerate(slots):
        if row >= 12 or i % 4 == 0:
            chart.text(chart.left - 6, top + i * row + row / 2 + 4, f"slot {slot}", anchor="end")
    for group, path in _paths(_runs(chart, pieces, slots), slots, top, row).items():
        chart.body.append(f'<path fill="{COLOURS[group]}" d="{path}"><title>{group}</title></path>')
    rules = "".join(f"M{chart.left},{top + i * row}H{_WIDTH - chart.right}" for i in range(1, len(slots)))
    chart.body.append(f'<path stroke="var(--paper,#fff)" stroke-width="{2 if row > 7 else 1}" d="{rules}"/>')
    bottom = top + len(slots) * row
    for at, words in checkpoints:
        x = chart.at_x(min(at, end_s))
        chart.body.append(f'<path class="saved" d="M{x},{bottom}l-3,6h6z"><title>{escape(words)}</title></path>')
    for at, words in faults:
        x = chart.at_x(min(at, end_s))
        chart.body.append(f'<g class="fault"><path d="M{x},{top - 4}V{bottom}"/><title>{escape(words)}</title></g>')
        chart.text(x, top - 8, "×", anchor="middle", colour="#d63c4a")
    return chart.svg(alone=False, label=f"what {len(slots)} slots did over {show_duration(end_s)}")


def group_of(piece: Piece) -> str:
    """What most of a piece was spent on."""
    if not piece.spent:
        return Bucket.UNKNOWN.group
    sums: dict[str, int] = {}
    for bucket, amount in piece.spent.items():
        sums[bucket.group] = sums.get(bucket.group, 0) + amount
    return max(sums, key=lambda g: sums[g])


def _runs(chart: Chart, pieces: Sequence[Piece], slots: Sequence[int]) -> dict[int, list[Run]]:
    """For each slot what it did from which pixel to which; what is too thin to be seen goes into its neighbour, faults excepted."""
    runs: dict[int, list[Run]] = {slot: [] for slot in slots}
    for piece in pieces:
        x0, x1 = chart.at_x(piece.begin / 1e6), chart.at_x(piece.end / 1e6)
        shares = _shares(piece)
        for slot, what in [*((s, shares) for s in piece.active), *((s, _IDLE) for s in piece.idle)]:
            told = runs.get(slot)
            if told is None:
                continue
            if told and told[-1][2] == what and x0 - told[-1][1] < _THIN_PX:
                told[-1] = (told[-1][0], x1, what)
            elif not told or x1 - told[-1][1] >= _THIN_PX or (what[0][0] in ("fault", "redone work") and told[-1][2][0][0] != what[0][0]):
                told.append((x0, max(x1, round(x0 + _THIN_PX, 2)), what))
    return runs


def _paths(runs: dict[int, list[Run]], slots: Sequence[int], top: float, row: float) -> dict[str, str]:
    """For each group one path of all its rectangles; neighbours that did the same share theirs."""
    found: dict[str, list[str]] = {}
    first = 0
    while first < len(slots):
        last = first
        while last + 1 < len(slots) and runs[slots[last + 1]] == runs[slots[first]]:
            last += 1
        for x0, x1, shares in runs[slots[first]]:
            for i in [first] if len(shares) == 1 else range(first, last + 1):
                y, height = top + i * row, row * (last - first + 1 if len(shares) == 1 else 1)
                for group, share in shares:  # waits stand on top of the steps that they held up
                    width = round(x1 - x0, 2)
                    found.setdefault(group, []).append(f"M{x0:g},{y:g}h{width:g}v{round(height * share, 2):g}h-{width:g}z")
                    y = round(y + height * share, 2)
        first = last + 1
    return {group: "".join(parts) for group, parts in found.items()}


def _shares(piece: Piece) -> tuple[tuple[str, float], ...]:
    """The groups of a piece from top to bottom, in tenths so that like neighbours become one."""
    whole = sum(piece.spent.values())
    sums: dict[str, int] = {}
    for bucket, amount in piece.spent.items():
        sums[bucket.group] = sums.get(bucket.group, 0) + amount
    tenths = {g: round(10 * amount / whole) for g, amount in sums.items()} if whole else {}
    main = group_of(piece)
    tenths[main] = 10 - sum(n for g, n in tenths.items() if g != main)
    return tuple((g, n / 10) for g, n in sorted(tenths.items(), key=lambda item: item[0] == "productive") if n > 0)
