"""The ledger: a fold over one node's events that books every slot-second of the run once, and corrects itself when more is known."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import Enum

from .. import events as ev
from ..events import Event
from .book import Book, Piece
from .buckets import Bucket
from .stragglers import Stragglers
from .waits import Waits, microseconds


class _Mode(Enum):
    """What the launcher is at."""

    OFF = "no launcher is at work"
    START = "ranks are starting"
    STEP = "every rank has stepped"
    FAULT = "a fault is being dealt with"
    END = "the run is ending"


class Ledger:
    """One node's book, written event by event. `book` holds what is settled; `settled()` adds what is not yet, as far as it is told."""

    def __init__(self) -> None:
        self.book = Book()
        self.between_us = 0
        """Time between launchers: nobody held the slots."""
        self.uploading_us = 0
        """Time in which a checkpoint was on its way to storage; training went on."""
        self.redone_known = True
        """False once an attempt began of which cannot be told whether it repeats earlier steps."""
        self.newest_us = 0
        """The moment of the newest event, in microseconds since the first."""
        self.stragglers = Stragglers()
        self.starved = ""
        """What was last said of a loader that does not keep up."""
        self._now = 0
        self._offset: int | None = None
        self._wall = ""
        self._slots: tuple[int, ...] = ()
        self._active: tuple[int, ...] = ()
        self._asked = 0
        self._mode = _Mode.OFF
        self._bucket = Bucket.UNKNOWN
        self._attempt = -1
        self._step = -1
        self._first_t = 0
        self._numbered = self._again = self._giving_up = self._ever_stepped = False
        self._restored = -1
        self._waits = Waits()
        self._told_t = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def add(self, e: Event) -> None:
        """Book what this event tells. Events may be missing, repeated or late; time never runs backwards."""
        if isinstance(e, ev.RunStarted):
            self._run_started(e)
        self.newest_us = max(self.newest_us, self._at(e.t))
        match e:
            case ev.AttemptStarted():
                self._attempt_started(e)
            case ev.RankProgress():
                self._progress(e)
            case ev.Restored():
                self._restored, self._numbered = e.step, True
            case ev.FirstStep():
                self._first_step(e)
            case ev.Failed():
                self._failed(e)
            case ev.Decided():
                self._decided(e)
            case ev.Stopping():
                self._stopping(e)
            case ev.Stopped():
                self._stopped(e)
            case ev.RunEnded():
                self._run_ended(e)
            case ev.DataStarved():
                self.starved = e.text
            case _:
                pass
        self.stragglers.add(e)
        self._wall = e.wall or self._wall

    def settled(self) -> Book:
        """The book up to the newest event, with the time that is still open under its likeliest name."""
        open_book = Book(pieces=list(self.book.pieces))
        if self.newest_us > self._now:
            spent = self._carved(self.newest_us, self._open_bucket(), keep=True)
            open_book.add(self._piece(self.newest_us, spent))
        return open_book

    def _run_started(self, e: ev.RunStarted) -> None:
        if self._offset is not None:
            self._close(self.newest_us, self._open_bucket())
            gap = _gap_us(self._wall, e.wall)
            self.between_us += gap
            self._now = self.newest_us + gap
        self._offset = self._now - microseconds(e.t)
        self._slots = tuple(dict.fromkeys((*e.slots, *e.spares)))
        self._active, self._asked = e.slots, len(e.slots)
        self._mode, self._bucket = _Mode.START, Bucket.START_LAUNCH
        self._again = self._giving_up = False
        self._numbered = False

    def _attempt_started(self, e: ev.AttemptStarted) -> None:
        self._close(self._at(e.t), self._open_bucket())
        self._active = e.slots
        self._slots = tuple(dict.fromkeys((*self._slots, *e.slots)))
        self._asked = self._asked or len(e.slots)
        self._attempt = e.attempt
        self._again = self._again or self._mode is _Mode.STEP
        self._mode, self._bucket = _Mode.START, Bucket.FAULT_START if self._again else Bucket.START_LAUNCH
        self._waits, self._restored = Waits(), -1

    def _first_step(self, e: ev.FirstStep) -> None:
        if self._mode in (_Mode.STEP, _Mode.END):
            return
        names = _FAULT_MARKS if self._again else _START_MARKS
        for bucket, mark in zip(names, (e.boot_t, e.torch_t, e.init_t, e.restore_begin_t, e.restore_end_t), strict=True):
            if mark > 0:
                self._close(min(self._at(mark), self._at(e.first_step_t or e.t)), bucket)
        self._close(self._at(e.first_step_t or e.t), names[3])
        self._mode, self._bucket = _Mode.STEP, Bucket.PRODUCTIVE
        self._first_t, self._told_t = self._now, self._now
        self._ever_stepped = True
        before = max(e.step - 1, self._restored)
        if self._step >= 0 and self._numbered:
            self.book.redo(before)
        elif self._step >= 0:
            self.redone_known = False
            self.book.forget_steps()
        self._step = e.step

    def _progress(self, e: ev.RankProgress) -> None:
        if self._mode not in (_Mode.START, _Mode.STEP):
            return
        self._waits.told(e, book=self._mode is _Mode.STEP)
        if self._mode is _Mode.START:
            return
        at, step = self._at(e.t), max(e.steps, default=-1)
        if e.saved_step > e.durable_step:
            self.uploading_us += max(at - self._told_t, 0)
        self._told_t = max(at, self._told_t)
        stepped = min(self._at(e.step_t), at) if e.step_t > 0 else at
        if step > self._step and stepped > self._now:
            self._close(stepped, Bucket.PRODUCTIVE, steps=(self._step, step))
            self._step = step

    def _failed(self, e: ev.Failed) -> None:
        if self._mode not in (_Mode.START, _Mode.STEP):
            return
        told = self._at(e.t)
        fault = min(self._at(e.fault_t), told) if e.fault_t > 0 else told
        if self._mode is _Mode.START:
            self._close(fault, self._open_bucket())
        elif fault < self._now:  # what was taken for training was the silence after the fault
            self._now = max(fault, self._first_t)
            self.book.take_back(self._now)
        else:
            self._close(fault, Bucket.REDONE)  # a step begun and not finished
        self._close(told, Bucket.FAULT_DETECT)
        self._numbered = e.step >= 0
        self._fault()

    def _decided(self, e: ev.Decided) -> None:
        self._giving_up = e.action == "give up"
        if self._mode is _Mode.STEP:  # nothing failed here: the group changes
            self._close(self._at(e.t), Bucket.REDONE)
            self._numbered = False
            self._fault()

    def _fault(self) -> None:
        self._mode, self._bucket, self._again = _Mode.FAULT, Bucket.FAULT_STOP, True
        self._waits = Waits()

    def _stopping(self, e: ev.Stopping) -> None:
        if e.why == "restart" or self._mode is _Mode.OFF:
            return
        self._close(self._at(e.t), self._open_bucket())
        self._mode, self._bucket = _Mode.END, Bucket.SHUTDOWN

    def _stopped(self, e: ev.Stopped) -> None:
        if self._mode is _Mode.FAULT:
            self._close(self._at(e.t), self._bucket)
            self._bucket = Bucket.SHUTDOWN if self._giving_up else Bucket.FAULT_RENDEZVOUS

    def _run_ended(self, e: ev.RunEnded) -> None:
        if self._mode is _Mode.STEP:  # the last step is over: what came after it, unless it waited or evaluated, was the way out
            self._close(self._at(e.t), Bucket.SHUTDOWN)
        else:
            self._close(self._at(e.t), Bucket.SHUTDOWN if self._giving_up else self._open_bucket())
        self._mode = _Mode.OFF

    # -- booking -------------------------------------------------------------------------------------------------------

    def _open_bucket(self) -> Bucket:
        """What the time since the last settled moment is booked as, unless more is told."""
        if self._mode is _Mode.START and self._attempt >= 0 and self._bucket in (Bucket.START_LAUNCH, Bucket.FAULT_START):
            if not self._ever_stepped:
                return Bucket.UNKNOWN  # a script whose steps nobody sees
            return Bucket.FAULT_FIRST_STEP if self._again else Bucket.START_FIRST_STEP
        return Bucket.UNKNOWN if self._mode is _Mode.OFF else self._bucket

    def _close(self, at: int, bucket: Bucket, *, steps: tuple[int, int] | None = None) -> None:
        """Book the time up to `at`, but not beyond the newest event: the one door through which time gets into the book."""
        at = min(at, self.newest_us)
        if at > self._now:
            self.book.add(self._piece(at, self._carved(at, bucket), steps))
            self._now = at

    def _piece(self, at: int, spent: dict[Bucket, int], steps: tuple[int, int] | None = None) -> Piece:
        idle = tuple(s for s in self._slots if s not in self._active) if len(self._slots) != len(self._active) else ()
        return Piece(
            begin=self._now, end=at, active=self._active, idle=idle, asked=self._asked, spent=spent, steps=steps, attempt=self._attempt
        )

    def _carved(self, at: int, bucket: Bucket, *, keep: bool = False) -> dict[Bucket, int]:
        """The active slots' time up to `at`, with the waits that are owed taken out of `bucket`."""
        room = (at - self._now) * len(self._active)
        spent = self._waits.carve(room, keep=keep)
        spent[bucket] = spent.get(bucket, 0) + room - sum(spent.values())
        return spent

    def _at(self, t: float) -> int:
        """An event's time in microseconds since the first event; never before what is known to be over where that is not a time."""
        us = microseconds(t)
        if self._offset is None:
            self._offset = -us
        return max(us + self._offset, 0)


_START_MARKS = (Bucket.START_LAUNCH, Bucket.START_IMPORT, Bucket.START_INIT, Bucket.START_FIRST_STEP, Bucket.START_RESTORE)
_FAULT_MARKS = (Bucket.FAULT_START, Bucket.FAULT_IMPORT, Bucket.FAULT_INIT, Bucket.FAULT_FIRST_STEP, Bucket.FAULT_RESTORE)


def fold_nodes(events: Iterable[Event]) -> dict[str, Ledger]:
    """A ledger for each node; events of different nodes may come in any order, for each node has a clock of its own."""
    ledgers: dict[str, Ledger] = {}
    for e in events:
        ledgers.setdefault(e.node, Ledger()).add(e)
    return ledgers


def _gap_us(before: str, after: str) -> int:
    try:
        gap = (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
    except (ValueError, TypeError):
        return 0
    return max(microseconds(gap), 0)
