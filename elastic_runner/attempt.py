"""Watches the ranks of one attempt and says what happened to them; decides nothing and stops nobody."""

from __future__ import annotations

import json
import re
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..progress import Progress
from . import memory, processes
from .bad_numbers import NumbersWatch
from .hang import HangDetector, Suspicion, culprit
from .policy import Failure, Kind
from .processes import Signs
from .signals import Signals
from .workers import Rank, WorkerContext

LOOK_EVERY_S = 0.2
_WEIGH_EVERY_S = 1.0
_CONNECTION_LOST = re.compile(r"(gloo|nccl|Dist\w*Error).*(connect|closed|reset|refused|broken pipe|remote process)", re.IGNORECASE)
STARTED_AFTER_S = 60.0
"""A script that shows no steps counts as started once it has run this long."""
_SAY_LEFT_AFTER_S = 10.0
_DIES_WITHIN_S = 0.2
_ENDS_WITHIN_MS = 3000
"""How long an interpreter that has begun to end is waited for, where its status tells whose fault it was."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Every rank ended with 0."""


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """A signal came to the launcher."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The attempt's first failure, with what people are told: the cause in words, the exception, its log, the stacks."""

    failure: Failure
    cause: str
    log: str = ""
    fault_t: float = 0.0
    pid: int = 0
    evidence: tuple[str, ...] = ()
    silent_s: float = 0.0
    stacks: dict[int, tuple[str, ...]] | None = None
    trusted_step: int | None = None
    """What was saved after this step is not to be restored from; None where a failure says nothing against it."""

    @property
    def where(self) -> str:
        """The step and the slot, in words."""
        f = self.failure
        at = "before its first step" if f.step is None else f"after step {f.step}"
        slot = f", slot {f.slot}" if f.slot >= 0 else ""
        return f"{f'after {f.unnumbered} steps of this attempt' if f.unnumbered else at}{slot}"


@dataclass(frozen=True, kw_only=True)
class Left:
    """Some ranks ended with 0 a while ago, and the others go on."""

    gone: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Nothing happened for a look's length."""


Observation = Finished | Signalled | Broken | Left | Tick


class Attempt:
    """One attempt's ranks under watch."""

    def __init__(
        self,
        context: WorkerContext,
        signals: Signals,
        detector: HangDetector | None,
        lost: Callable[[Rank, Progress], bool],
        numbers: NumbersWatch,
        *,
        whole_job: bool = True,
    ) -> None:
        """`detector` is None where hang detection is off; `lost` says whether a rank died of its slot being lost; `whole_job`
        whether all of the job's ranks are here."""
        self.context = context
        self.born_t = time.monotonic()
        self._signals = signals
        self._detector = detector
        self._lost = lost
        self._whole_job = whole_job
        self._group = memory.own_group()
        self._oom_kills = memory.oom_kills(self._group)
        self.hurt: set[int] = set()
        """Ranks that chaos has hit from outside."""
        self.numbers = numbers
        self._looked_t = self._weighed_t = 0.0
        self._said_left = False
        self._poll = select.poll()
        self._poll.register(signals, select.POLLIN)
        self._waiting = {r.pidfd: r for r in context.ranks}
        for fd in self._waiting:
            self._poll.register(fd, select.POLLIN)

    @property
    def ranks(self) -> list[Rank]:
        """The ranks, by local rank; empty once they were ended."""
        return self.context.ranks

    def forget_detector(self) -> None:
        """Look for hangs no more in this attempt."""
        self._detector = None

    def pages(self) -> dict[int, Progress]:
        """Every rank's page, by global rank."""
        return {r.rank: r.page.read() for r in self.ranks}

    def observe(self, timeout_s: float = LOOK_EVERY_S) -> Observation:
        """Wait until something happens, at most `timeout_s` seconds."""
        if not self._signals.queue:
            for fd, _ in self._poll.poll(timeout_s * 1000):
                if fd in self._waiting:
                    self._poll.unregister(fd)
                    self._waiting.pop(fd).look()
        signum = self._signals.take()
        if signum is not None:
            return Signalled(signum=signum)
        if any(r.code for r in self.ranks):
            return self._death(self._first())
        if all(r.code == 0 for r in self.ranks):
            return Finished()
        if time.monotonic() - self._looked_t < LOOK_EVERY_S:
            return Tick()
        self._looked_t = time.monotonic()
        if self._looked_t - self._weighed_t >= _WEIGH_EVERY_S:
            self._weighed_t = self._looked_t
            for r in self.ranks:
                r.held = memory.resident(r.pid) or r.held
        return self._bad_numbers() or self._look() or self._left() or Tick()

    def _first(self) -> Rank:
        """Who was first: a rank that something killed brings its peers down with exceptions, hardly ever the other way round."""
        for r in self.ranks:
            r.look()
        dead = [r for r in self.ranks if r.code]
        first = min(dead, key=lambda r: ((r.code or 0) >= 0, r.ended_t))
        if (first.code or 0) < 0 or not _lost_connection(first):
            return first
        # one that raises, or leaves, has said so before its connections close, and may take longer to end than a peer that misses it
        if raised := self._raised():
            return min(raised, key=lambda r: (r.code is None, r.ended_t))
        leaving = [r for r in self.ranks if (r.code or 0) >= 0 and r.page.read().leaving_t]
        if leaving and (left := min(leaving, key=lambda r: r.page.read().leaving_t)) is not first:
            _await_end(left)
            return left if left.code else first
        return self._dying() or first

    def _dying(self) -> Rank | None:
        """A rank that a signal kills loses its connections a moment before it has ended; on a busy machine a peer may end in between."""
        end = time.monotonic() + _DIES_WITHIN_S
        while (left := end - time.monotonic()) > 0 and (alive := {r.pidfd: r for r in self.ranks if r.code is None}):
            poll = select.poll()
            for fd in alive:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(left * 1000):
                alive[fd].look()
                if (alive[fd].code or 0) < 0:
                    return alive[fd]
        return None

    def _raised(self) -> list[Rank]:
        """The ranks that have left an exception of their own behind; they may not have ended yet, and may never."""
        return [r for r in self.ranks if r.code != 0 and _exception(r)[0] and not _lost_connection(r)]

    def _death(self, first: Rank) -> Broken:
        page, code = first.page.read(), first.code or 0
        message, log = _exception(first)
        if code < 0:
            lost = self._lost(first, page)
            cause = f"rank {first.rank} lost its slot" if lost else f"rank {first.rank} killed by {signal_name(-code)}"
            kind = Kind.SLOT_LOST if lost else Kind.SIGNAL
            if code == -signal.SIGKILL and not lost and first.rank not in self.hurt and not page.chaos_fired:
                for_memory = memory.oom_kills(self._group) > self._oom_kills
                cause += f" ({memory.verdict(first.held, memory.limit(self._group), for_memory)})"
        else:
            cause = f"rank {first.rank} {'raised ' + message.splitlines()[0] if message else f'exited with status {code}'}"
            kind = Kind.CONNECTION if _lost_connection(first) else Kind.EXCEPTION
            if kind is Kind.CONNECTION and (over := self._training_is_over()):
                kind, cause = Kind.TEARDOWN, f"{over}, then {cause}"
            kind = Kind.STORAGE if message.startswith("SnapshotKept:") else kind
        fault_t = first.ended_t or time.monotonic()
        return Broken(failure=self._failure(first, page, kind, message), cause=cause, log=log, fault_t=fault_t, pid=first.pid)

    def _bad_numbers(self) -> Broken | None:
        pages = self.pages()
        bad = self.numbers.look(pages)
        if bad is None:
            return None
        first = next(r for r in self.ranks if r.rank == bad.rank)
        slot = first.slot if bad.alone else -1
        shared = self.numbers.world_size > len(self.ranks)
        failure = replace(self._failure(first, pages[bad.rank], bad.kind), step=bad.step, slot=slot, shared=shared)
        return Broken(failure=failure, cause=bad.cause, fault_t=failure.t, pid=first.pid, trusted_step=bad.trusted_step)

    def device_to_blame(self, slot: int, kind: Kind, cause: str) -> Broken:
        """A failure of the device of `slot`, whatever its rank itself shows; that rank is not expected to answer any more."""
        r = next(r for r in self.ranks if r.slot == slot)
        failure = self._failure(r, r.page.read(), kind)
        return Broken(failure=failure, cause=f"rank {r.rank}: {cause}", fault_t=failure.t, pid=r.pid, evidence=(cause,))

    def _training_is_over(self) -> str:
        """That every rank has made as many steps as one that has ended with 0, in words; nothing if not so, or not known."""
        pages = list(self.pages().values())
        if not any(r.code == 0 for r in self.ranks) or not pages[0].steps_done or len({(p.step, p.steps_done) for p in pages}) > 1:
            return ""
        durable = max(p.durable_step for p in pages)
        if not pages[0].numbered:
            return f"training was over: every rank had made {pages[0].steps_done} steps"
        saved = f"the checkpoint of step {durable} is complete" if durable >= 0 else "no checkpoint of goodrun's was made"
        return f"training was over: every rank had made step {pages[0].step}; {saved}"

    def _failure(self, r: Rank, page: Progress, kind: Kind, message: str = "") -> Failure:
        now = time.monotonic()
        started = now - self.born_t > STARTED_AFTER_S or any(p.steps_done for p in self.pages().values())
        return Failure(
            t=now,
            kind=kind,
            slot=r.slot,
            rank=r.rank,
            step=page.step if page.numbered and page.step >= 0 else None,
            started=started,
            message=message,
            unnumbered=0 if page.numbered else page.steps_done,
        )

    def _look(self) -> Broken | None:
        if self._detector is None:
            return None
        now, seen = time.monotonic(), {}
        for r in self.ranks:
            if r.code is None:
                page = r.page.read()
                if not page.t:  # its interpreter is not up yet
                    page = replace(page, t=self.born_t)
                beats = now - page.t < LOOK_EVERY_S  # a rank that beats needs no other sign of life
                seen[r.rank] = (page, Signs(state="R", cpu_s=0, switches=0, io_bytes=0) if beats else processes.signs(r.pid))
        suspicion = self._detector.look(now, seen, finishing=any(r.code == 0 for r in self.ranks))
        return None if suspicion is None else self._blame(suspicion, {rank: page for rank, (page, _) in seen.items()})

    def _blame(self, suspicion: Suspicion, pages: dict[int, Progress]) -> Broken | None:
        stacks = self.context.stacks()
        stopped = "stopped (state T)" in suspicion.evidence
        if not stopped and any(r.page.read().seq != pages[r.rank].seq for r in self.ranks if r.rank in pages):
            return None  # it moved while we looked
        if raised := self._raised():  # its interpreter waits for a thread, or takes its memory apart: the others wait for it
            return self._death(raised[0])
        blamed = (suspicion.ranks[0], "") if stopped else culprit(suspicion.ranks, pages, stacks, self._whole_job)
        if blamed is None:
            assert self._detector is not None
            self._detector.cleared(time.monotonic(), suspicion.silent_s)
            return None
        rank, why = blamed
        r = next(r for r in self.ranks if r.rank == rank)
        page = pages[rank]
        evidence = suspicion.evidence
        if stream := processes.writes_to(r.pid):
            evidence = (*evidence, f"blocked on output: nobody reads what it writes to {stream}")
        cause = f"rank {rank} hangs: {'; '.join(evidence)}"
        return Broken(
            failure=self._failure(r, page, Kind.HANG),
            cause=cause,
            fault_t=page.t or time.monotonic(),
            pid=r.pid,
            evidence=(*evidence, *([why] if why else [])),
            silent_s=suspicion.silent_s,
            stacks=stacks,
        )

    def _left(self) -> Left | Broken | None:
        gone = [r for r in self.ranks if r.code == 0]
        if not gone or time.monotonic() - max(r.ended_t for r in gone) < _SAY_LEFT_AFTER_S:
            return None
        waiting = [r for r in self.ranks if r.code is None]
        if not self._said_left:
            self._said_left = True
            return Left(gone=tuple(r.rank for r in gone), waiting=tuple(r.rank for r in waiting))
        if self._detector is None:
            return None
        over, limits = self._training_is_over(), self._detector.limits
        limit_s = limits.teardown_s if over else limits.left_s
        if self._detector.calm_for(tuple(r.rank for r in waiting)) > limit_s:
            r = waiting[0] if over else gone[0]
            still = f"rank {waiting[0].rank} has shown no sign of work for {limit_s:.0f} s"
            cause = f"{over or f'rank {r.rank} left with status 0'}; {still}"
            kind = Kind.TEARDOWN if over else Kind.LEFT
            return Broken(failure=self._failure(r, r.page.read(), kind), cause=cause, fault_t=gone[0].ended_t, pid=r.pid)
        return None


def signal_name(signum: int) -> str:
    """SIGKILL for 9, and a plain number for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _await_end(r: Rank) -> None:
    """Of a rank whose interpreter has begun to end."""
    poll = select.poll()
    poll.register(r.pidfd, select.POLLIN)
    poll.poll(_ENDS_WITHIN_MS)
    r.look()


def _lost_connection(r: Rank) -> bool:
    """Whether the exception that a rank left behind only says that a peer is gone."""
    return bool(_CONNECTION_LOST.search(_exception(r)[0].partition("\n")[0]))


def _exception(r: Rank) -> tuple[str, str]:
    """The exception a rank left behind (its line, then the traceback), and the file where more of it is."""
    where = r.stderr_file
    try:
        body = json.loads(Path(r.error_file).read_text())["message"]
        return (f"{body['message']}\n{body['extraInfo']['py_callstack']}", where) if isinstance(body, dict) else (str(body), where)
    except (OSError, ValueError, KeyError, TypeError):
        return "", where
