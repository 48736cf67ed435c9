"""The report's page: what there is to say about a run, as one HTML text without scripts or links to anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from os.path import basename

from .. import events as ev
from ..drawing import PALETTE, STYLE, Chart, nice_ticks
from ..goodput.account import Goodput
from ..goodput.advice import advise
from ..goodput.buckets import Bucket
from ..history import Attempt, History, Phases
from ..planning.durations import show_duration
from .timeline import COLOURS

_CSS = """
:root{--paper:#fff;--ink:#1c2024;--soft:#5b6470;--faint:#e3e6ea;--card:#f6f7f9;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#9aa4af;--faint:#2c3238;--card:#1d2125}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--faint:#ccc;--card:#fff}section{break-inside:avoid}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1060px;margin:0 auto;padding:24px 20px 60px}h1{font-size:24px;margin:0 0 2px}h2{font-size:17px;margin:34px 0 8px}
p{margin:4px 0}.soft{color:var(--soft)}.cards{display:grid;
grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:18px}
.card{background:var(--card);border:1px solid var(--faint);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:24px;font-weight:600}
svg{width:100%;height:auto;display:block}table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--faint);vertical-align:middle}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td{overflow-wrap:anywhere}.w{min-width:220px}.bar{height:10px;border-radius:2px;min-width:1px}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0;font-size:13px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;
margin-right:5px}.fault path{stroke:#d63c4a;stroke-dasharray:3 3;fill:none}.saved{fill:var(--ink)}ol{padding-left:28px}li{margin:4px 0}
pre{background:var(--card);border:1px solid var(--faint);border-radius:8px;padding:10px;overflow-x:auto;font-size:12px;white-space:pre-wrap}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
"""
_ATTEMPTS_SHOWN = 200
_PHASE_COLOURS = dict(zip(Phases().spent(), (*PALETTE, "#4a90a4", "#9aa0a6"), strict=True))


def page(
    run: ev.RunStarted,
    history: History,
    goodput: Goodput,
    timelines: Sequence[tuple[str, str]],
    pace: Sequence[float],
    losses: Sequence[tuple[float, float]],
    notes: Iterable[str],
) -> str:
    """The whole page. `timelines`: for each node its name and its picture; `pace`: steps a second in equal parts of the run;
    `losses`: seconds since its beginning and the loss then."""
    name = escape(history.run_id or "run")
    parts = [
        f"<h1>{escape(basename(history.script) or 'run')} <span class='soft'>{name}</span></h1>",
        f"<p>{_outcome(history)}</p>",
        _cards(goodput, history),
        "<section><h2>Slots over time</h2>",
        _key(goodput),
        *(f"{f'<p class=soft>{escape(node)}</p>' if len(timelines) > 1 else ''}{picture}" for node, picture in timelines),
        "<p class='soft'>× a fault; ▴ a checkpoint became durable. Waits stand on top of the steps that they held up.</p></section>",
        _pace(pace, goodput.wall_s / max(goodput.nodes, 1)),
        _losses(losses),
        _advice(goodput),
        _buckets(goodput),
        _restarts(history),
        _recoveries(history),
        _notes(notes),
        _environment(run, history),
    ]
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>goodrun report: {name}</title>"
    head += f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{_CSS}{STYLE}</style></head>"
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _outcome(history: History) -> str:
    words = f"{history.outcome}" + (f" at step {history.best_step}" if history.best_step >= 0 else "")
    words += f", {history.restarts} restart{'' if history.restarts == 1 else 's'}; began {history.started_wall[:19].replace('T', ' ')} UTC"
    return escape(words + (f"; {history.reason}" if history.reason else ""))


def _cards(goodput: Goodput, history: History) -> str:
    cards = [
        (f"{100 * goodput.time_goodput:.1f} %", "goodput: of the time"),
        (f"{100 * goodput.capacity_goodput:.1f} %", "of the capacity asked for"),
        (show_duration(goodput.wall_s / max(goodput.nodes, 1)), "at work"),
        (f"{goodput.slot_s:,.0f}", "slot-seconds"),
    ]
    if goodput.between_s:
        cards.insert(2, (f"{100 * goodput.ettr:.1f} %", "ETTR: with the time between launchers"))
    if history.restarts:
        cards.append((f"{history.recovery_s:,.1f} s", f"coming back, {history.restarts} times"))
    return "<div class='cards'>" + "".join(f"<div class='card'><b>{escape(a)}</b>{escape(b)}</div>" for a, b in cards) + "</div>"


def _key(goodput: Goodput) -> str:
    used = [group for group, spent in goodput.groups().items() if spent]
    return "<div class='key'>" + "".join(f"<span><i style='background:{COLOURS[g]}'></i>{g}</span>" for g in used) + "</div>"


def _pace(pace: Sequence[float], wall_s: float) -> str:
    most = max(pace, default=0.0)
    if not most:
        return ""
    chart = Chart(width=1000, height=200, x=(0.0, wall_s or 1.0), y=(0.0, most * 1.1), left=56, right=14, top=16, bottom=20)
    chart.axes([], [(v, f"{v:g}") for v in nice_ticks(0, most * 1.1, 4)])
    chart.line([((i + 0.5) / len(pace) * wall_s, value) for i, value in enumerate(pace)], COLOURS["productive"])
    return f"<section><h2>Steps a second</h2>{chart.svg(alone=False, label='steps a second over the run')}</section>"


def _losses(losses: Sequence[tuple[float, float]]) -> str:
    if len(losses) < 2:
        return ""
    least, most = min(loss for _, loss in losses), max(loss for _, loss in losses)
    room = (most - least) * 0.05 or abs(most) * 0.05 or 1.0
    low, high = least - room, most + room
    chart = Chart(width=1000, height=200, x=(0.0, losses[-1][0] or 1.0), y=(low, high), left=56, right=14, top=16, bottom=20)
    chart.axes([], [(v, f"{v:g}") for v in nice_ticks(low, high, 4)])
    chart.line(list(losses), COLOURS["start-up"])
    return f"<section><h2>Loss</h2>{chart.svg(alone=False, label='the loss over the run')}</section>"


def _advice(goodput: Goodput) -> str:
    items = advise(goodput)[:8]
    if not items:
        return "<section><h2>What to improve next</h2><p>Nothing lost more than half a percent.</p></section>"
    rows = "".join(
        f"<li><b>{item.slot_s:,.1f} slot-s</b> ({100 * item.share:.1f} %) {escape(item.name)}: {escape(item.text)}</li>" for item in items
    )
    return f"<section><h2>What to improve next</h2><ol>{rows}</ol></section>"


def _buckets(goodput: Goodput) -> str:
    rows, most = [], max(goodput.buckets.values(), default=1.0) or 1.0
    for name, spent in goodput.buckets.items():
        if spent >= 0.05:
            colour = COLOURS[Bucket(name).group]
            bar = f"<div class='bar' style='background:{colour};width:{100 * spent / most:.1f}%'></div>"
            share = 100 * spent / goodput.slot_s
            rows.append(
                f"<tr><td>{name}</td><td class='n'>{spent:,.1f}</td><td class='n'>{share:.1f} %</td><td style='width:45%'>{bar}</td></tr>"
            )
    head = "<tr><th>spent on</th><th class='n'>slot-s</th><th class='n'>share</th><th></th></tr>"
    text = f"<section><h2>Where every slot-second went</h2><table>{head}"
    text += "".join(rows) + "</table>"
    if goodput.uploading_s:
        text += (
            f"<p class='soft'>Checkpoints were under way to storage for {goodput.uploading_s:,.1f} s while training went on: no loss.</p>"
        )
    if not goodput.redone_known:
        text += "<p class='soft'>An attempt did not say which steps it repeated: the redone work may be more.</p>"
    return text + "</section>"


def _restarts(history: History) -> str:
    titles = ("#", "began", "ranks", "from step", "redone", "back in", "how it ended", "what was decided")
    numeric = {"#", "ranks", "from step", "redone", "back in"}
    head = "".join(f"<th class='{'n' if t in numeric else ''}'>{t}</th>" for t in titles)
    shown = history.attempts[-_ATTEMPTS_SHOWN:]
    more = f"<p class='soft'>the newest {len(shown)} of {len(history.attempts)}</p>" if len(shown) < len(history.attempts) else ""
    return f"<section><h2>Attempts</h2>{more}<table><tr>{head}</tr>{''.join(_attempt(a) for a in shown)}</table></section>"


def _attempt(a: Attempt) -> str:
    back = f"{a.recovery.total:.2f} s" if a.recovery and a.recovery.finished else ""
    numbers = (str(a.attempt), a.started_wall[11:19], str(a.world_size), str(a.restored_step) if a.restored_step >= 0 else "")
    cells = [*numbers, "" if a.steps_redone is None else str(a.steps_redone), back]
    row = "".join(f"<td class='{'' if i == 1 else 'n'}'>{escape(c)}</td>" for i, c in enumerate(cells))
    decided = ": ".join(filter(None, (a.decided, a.reason if a.decided else "")))
    return f"<tr>{row}<td>{escape(a.cause)}</td><td class='w'>{escape(decided)}</td></tr>"


def _recoveries(history: History) -> str:
    back = [(a, a.recovery) for a in history.attempts if a.recovery is not None][-40:]
    if not back:
        return ""
    longest = max(p.total for _, p in back) or 1.0
    chart = Chart(width=1000, height=26 * len(back) + 44, x=(0.0, longest), y=(0.0, 1.0), left=56, right=70, top=10, bottom=30)
    chart.axes([(v, f"{v:g} s") for v in nice_ticks(0, longest, 6)], [])
    for i, (a, phases) in enumerate(back):
        y, at = chart.top + 26 * i + 3, 0.0
        chart.text(chart.left - 6, y + 14, f"to #{a.attempt}", anchor="end")
        for phase, spent in phases.spent().items():
            if spent:
                x, width = chart.at_x(at), chart.at_x(at + spent) - chart.at_x(at)
                title = f"<title>{escape(phase)}: {spent:.2f} s</title>"
                chart.body.append(f'<rect x="{x}" y="{y}" width="{width:.2f}" height="20" fill="{_PHASE_COLOURS[phase]}">{title}</rect>')
            at += spent
        chart.text(chart.at_x(at) + 6, y + 14, f"{phases.total:.2f} s")
    key = "".join(f"<span><i style='background:{c}'></i>{escape(p.replace('_', ' '))}</span>" for p, c in _PHASE_COLOURS.items())
    picture = chart.svg(alone=False, label="the phases of each recovery")
    return f"<section><h2>From each fault to the first new step</h2><div class='key'>{key}</div>{picture}</section>"


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in notes)
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if items else ""


def _environment(run: ev.RunStarted, history: History) -> str:
    facts = {
        "command": " ".join(run.argv) or run.script,
        "folder": run.cwd,
        "host": run.node,
        "slots": ", ".join(map(str, run.slots)) + (f"; in reserve {', '.join(map(str, run.spares))}" if run.spares else ""),
        "torch": run.torch,
        "goodrun": run.version,
        "chaos": run.chaos,
        "lives": str(history.lives) if history.lives > 1 else "",
    }
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    failed = next((a for a in reversed(history.attempts) if a.message), None)
    trace = f"<h2>The last exception</h2><pre>{escape(failed.message)}</pre>" if failed is not None and failed.message else ""
    return f"<section>{trace}</section><section><h2>Environment</h2><dl>{rows}</dl></section>"
