"""The story of a run, folded from its events: which attempts there were, how each ended, what coming back cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from . import events as ev
from .events import Event

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds from a fault to the first new step, cut into what they were spent on; together they are the whole of it.

    In order: until the supervisor knew (detect), no process was left (stop), the group had formed anew (rendezvous), the slowest
    interpreter was up (start), torch was imported (imports), the process group was there (init); `restore` is the reading of the
    checkpoint alone, `first_step` the script's own set-up and its first step, and whatever no mark tells apart.
    """

    detect: float = 0.0
    stop: float = 0.0
    rendezvous: float = 0.0
    start: float = 0.0
    imports: float = 0.0
    init: float = 0.0
    restore: float = 0.0
    first_step: float = 0.0
    finished: bool = True
    """False if the first step has not come (yet): the seconds then reach to the end of the attempt, or to its newest event."""

    def spent(self) -> dict[str, float]:
        """Phase by phase, in the order in which they come."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "finished"}

    @property
    def total(self) -> float:
        """All of it, in seconds."""
        return round(sum(self.spent().values()), 6)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One generation of ranks: what it came from, how far it got and how it ended. -1 is an unknown step, None an unknown amount."""

    attempt: int
    life: int
    started_wall: str
    t0: float
    world_size: int
    slots: tuple[int, ...]
    left_out: tuple[int, ...]
    """Slots that an earlier attempt of this life had and this one has not."""
    kind: str
    """policy.Kind's value; else "finished", "stopped", "running", "replaced" or "launcher died"."""
    cause: str
    """How the attempt ended, in words."""
    message: str
    log: str
    decided: str
    """What policy made of it, in words; empty where nothing was to be decided."""
    reason: str
    restored_from: str
    restored_step: int
    best_step: int
    steps_redone: int | None
    recovery: Phases | None
    """The recovery that led to this attempt; None for the first of a life."""


@dataclass(frozen=True, kw_only=True)
class History:
    """A whole run. `lives` counts the launchers that worked on it; `outcome` is RunEnded's, else "running" or "died"."""

    run_id: str = ""
    script: str = ""
    argv: tuple[str, ...] = ()
    node: str = ""
    started_wall: str = ""
    newest_wall: str = ""
    lives: int = 0
    outcome: str = "running"
    status: int | None = None
    reason: str = ""
    best_step: int = -1
    restarts: int = 0
    recovery_s: float = 0.0
    redone_s: float | None = None
    """What the redone steps took, at the mean pace of this run; None where the record does not tell."""
    seconds_lost: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    chaos_fired: tuple[ev.ChaosFired, ...] = ()
    chaos_unfired: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Stretch:
    """The events from one AttemptStarted (None: before the first) to the next."""

    begin: ev.AttemptStarted | None
    events: list[Event]

    def first(self, kind: type[E]) -> E | None:
        return next((e for e in self.events if isinstance(e, kind)), None)

    def last(self, kind: type[E]) -> E | None:
        return next((e for e in reversed(self.events) if isinstance(e, kind)), None)

    def best_step(self) -> int:
        best = -1
        for e in self.events:
            if isinstance(e, ev.RankProgress):
                best = max(best, *e.steps, -1)
            elif isinstance(e, ev.Failed):
                best = max(best, e.step, e.best_step)
            elif isinstance(e, ev.FirstStep | ev.Restored | ev.RankExited | ev.RankHung | ev.RunEnded):
                best = max(best, e.step)
        return best


@dataclass(kw_only=True)
class _Life:
    """What one launcher wrote; `head` holds what came before its first attempt."""

    number: int
    head: _Stretch
    stretches: list[_Stretch]

    @property
    def run(self) -> ev.RunStarted | None:
        return self.head.first(ev.RunStarted)

    @property
    def end(self) -> ev.RunEnded | None:
        return (self.stretches[-1] if self.stretches else self.head).last(ev.RunEnded)


def fold(events: Iterable[Event], *, gone: bool = False) -> History:
    """The history that `events`, oldest first, tell. `gone`: the launcher is known to live no more, so a run without an end has died."""
    lives = _split(events)
    attempts: list[Attempt] = []
    for life in lives:
        unended = "running" if life is lives[-1] and not gone else "launcher died"
        for i in range(len(life.stretches)):
            attempts.append(_attempt(life, i, unended, max((a.best_step for a in attempts), default=-1)))
    stretches = [s for life in lives for s in (life.head, *life.stretches)]
    told = [e for s in stretches for e in s.events]
    run = next((life.run for life in reversed(lives) if life.run), ev.RunStarted())
    end = lives[-1].end if lives else None
    recovery_s = round(sum(a.recovery.total for a in attempts if a.recovery), 6)
    redone_s = _redone_s(attempts, stretches)
    return History(
        run_id=run.run_id,
        script=run.script,
        argv=run.argv,
        node=told[0].node if told else "",
        started_wall=told[0].wall if told else "",
        newest_wall=told[-1].wall if told else "",
        lives=len(lives),
        outcome=end.outcome if end else "died" if gone else "running",
        status=end.status if end else None,
        reason=end.reason if end else "",
        best_step=max((s.best_step() for s in stretches), default=-1),
        restarts=sum(max(len(life.stretches) - 1, 0) for life in lives),
        recovery_s=recovery_s,
        redone_s=redone_s,
        seconds_lost=round(recovery_s + (redone_s or 0.0), 6),
        attempts=tuple(attempts),
        chaos_fired=tuple(e for e in told if isinstance(e, ev.ChaosFired)),
        chaos_unfired=end.chaos_unfired if end else (),
        notices=tuple(e.text for e in told if isinstance(e, ev.Notice | ev.DataStarved)),
    )


def tile(begin: float, marks: Sequence[tuple[str, float]], end: float, *, finished: bool = True) -> Phases:
    """Cut [begin, end] at `marks`, each the name of the phase that ends there and its moment.

    A mark of 0 was never made: its time falls to the next one's phase, and what follows the last to `first_step`. A mark that comes
    before its predecessor or after the end is moved to it, so that the phases always sum to the interval, to the microsecond.
    """
    at, stop = _us(begin), max(_us(begin), _us(end))
    spent: dict[str, int] = {}
    for phase, moment in [*marks, ("first_step", end)]:
        if moment > 0:
            cut = min(max(_us(moment), at), stop)
            spent[phase] = spent.get(phase, 0) + cut - at
            at = cut
    return Phases(**{phase: us / 1e6 for phase, us in spent.items()}, finished=finished)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _split(events: Iterable[Event]) -> list[_Life]:
    lives: list[_Life] = []
    for e in events:
        if not lives or isinstance(e, ev.RunStarted):
            lives.append(_Life(number=len(lives) + 1, head=_Stretch(begin=None, events=[]), stretches=[]))
        life = lives[-1]
        if isinstance(e, ev.AttemptStarted):
            life.stretches.append(_Stretch(begin=e, events=[e]))
        else:
            (life.stretches[-1] if life.stretches else life.head).events.append(e)
    return lives


def _attempt(life: _Life, index: int, unended: str, best_before: int) -> Attempt:
    stretch, last = life.stretches[index], index == len(life.stretches) - 1
    begin = stretch.begin or ev.AttemptStarted()
    given = set(life.run.slots) - set(life.run.spares) if life.run else set()
    had = given.union(*(s.begin.slots for s in life.stretches[:index] if s.begin))
    kind, cause = _ending(stretch, "replaced" if not last else unended)
    failed, decided, restored = stretch.first(ev.Failed), stretch.last(ev.Decided), stretch.last(ev.Restored)
    return Attempt(
        attempt=begin.attempt,
        life=life.number,
        started_wall=begin.wall,
        t0=begin.t,
        world_size=begin.world_size,
        slots=begin.slots,
        left_out=tuple(sorted(had - set(begin.slots))),
        kind=kind,
        cause=cause,
        message=failed.message if failed else "",
        log=failed.log if failed else "",
        decided=_decision(decided, begin.slots) if decided else "",
        reason=decided.reason if decided else "",
        restored_from=restored.source if restored else "",
        restored_step=restored.step if restored else -1,
        best_step=stretch.best_step(),
        steps_redone=max(best_before - restored.step, 0) if restored and restored.step >= 0 and best_before >= 0 else None,
        recovery=_recovery(life.stretches[index - 1], stretch) if index else None,
    )


def _ending(stretch: _Stretch, otherwise: str) -> tuple[str, str]:
    """Of what kind an attempt's end was, and the words for it."""
    if failed := stretch.first(ev.Failed):
        return failed.kind, failed.cause or failed.kind or "failed"
    end, decided = stretch.last(ev.RunEnded), stretch.last(ev.Decided)
    asked = next((e for e in stretch.events if isinstance(e, ev.Stopping) and e.why == "signal"), None)
    if end is not None and end.outcome == "succeeded":
        return "finished", "finished"
    if asked is not None or (end is not None and end.outcome == "stopped"):
        return "stopped", f"stopped by {asked.signal}" if asked and asked.signal else (end.reason if end else "") or "stopped"
    if end is not None:
        return end.outcome or "failed", end.reason or end.outcome or "failed"
    if otherwise == "replaced" and decided is not None and decided.reason:
        return otherwise, decided.reason
    return otherwise, {"launcher died": "the launcher died", "replaced": "restarted"}.get(otherwise, otherwise)


def _decision(decided: ev.Decided, before: tuple[int, ...]) -> str:
    """Policy's answer and the slots it takes away or adds."""
    action = decided.action.lower().replace("_", " ").replace("-", " ")
    if action == "give up" or not decided.slots:
        return action
    gone, new = set(before) - set(decided.slots), set(decided.slots) - set(before)
    words = action.removesuffix(" without") + (f" without {_slots(gone)}" if gone else "")
    return words + (f"{',' if gone else ''} with {_slots(new)}" if new else "")


def _slots(slots: Iterable[int]) -> str:
    numbers = sorted(slots)
    return f"slot{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _recovery(before: _Stretch, after: _Stretch) -> Phases:
    """The time from what ended `before` to the first step of `after`."""
    begin_event = after.begin or ev.AttemptStarted()
    failed, stopped, first = before.first(ev.Failed), before.last(ev.Stopped), after.first(ev.FirstStep)
    known = [e.t for e in before.events if isinstance(e, ev.Failed | ev.Decided | ev.Stopping | ev.Stopped) and e.t > 0]
    begin = failed.fault_t if failed and failed.fault_t > 0 else min(known, default=begin_event.t - begin_event.rendezvous_s)
    marks = [
        ("detect", failed.t if failed else 0.0),
        ("stop", stopped.t if stopped else 0.0),
        ("rendezvous", begin_event.t),
    ]
    if first is not None:
        marks += [
            ("start", first.boot_t),
            ("imports", first.torch_t),
            ("init", first.init_t),
            ("first_step", first.restore_begin_t),  # building the model is the script's own time
            ("restore", first.restore_end_t),
        ]
        return tile(begin, marks, first.first_step_t or first.t)
    again = after.first(ev.Failed)
    end = again.fault_t or again.t if again else max(e.t for e in after.events)
    return tile(begin, marks, end, finished=False)


def _redone_s(attempts: Sequence[Attempt], stretches: Iterable[_Stretch]) -> float | None:
    redone = sum(a.steps_redone or 0 for a in attempts)
    if not redone:
        return 0.0
    paces = [_pace(s) for s in stretches]
    steps = sum(n for _, n in paces)
    return round(redone * sum(seconds for seconds, _ in paces) / steps, 6) if steps else None


def _pace(stretch: _Stretch) -> tuple[float, int]:
    """Seconds and steps between an attempt's first step and the last one known before its fault."""
    first, failed = stretch.first(ev.FirstStep), stretch.first(ev.Failed)
    if first is None:
        return 0.0, 0
    fault_t = (failed.fault_t or failed.t) if failed else float("inf")
    begin, at, best = first.first_step_t or first.t, 0.0, first.step
    for e in stretch.events:  # only a beat that brought a new step counts: the last ones may stand still
        if isinstance(e, ev.RankProgress) and e.t <= fault_t and max(e.steps, default=-1) > best:
            at, best = e.t, max(e.steps)
    if failed is not None and failed.best_step > best:
        at, best = fault_t, failed.best_step
    return (at - begin, best - first.step) if best > first.step and at > begin else (0.0, 0)
