"""How an attempt's ranks are ended: asked, given their time, killed; their helpers go with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..progress import Phase, Progress
from . import processes
from .attempt import Attempt, signal_name
from .events import Stopped, Stopping
from .hang import in_collective
from .journal import Journal
from .processes import Signs
from .signals import PASSED_ON, Signals
from .workers import Rank, WorkerContext

_LOOK_S = 0.3
_KILLED_WITHIN_S = 10.0


class Stuck:
    """Which ranks cannot even begin to obey: they stand in a collective, in C++, where Python runs no signal handler.

    Told by two looks that show the same stack in a collective and no sign of work between them. A rank that saves is never one.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[tuple[str, ...], Signs]] = {}

    def look(self, context: WorkerContext) -> list[Rank]:
        """The ranks that stand as they stood at the look before."""
        living = [r for r in context.ranks if not r.look() and r.page.read().phase is not Phase.SAVE]
        signs = {r.rank: processes.signs(r.pid) for r in living}
        stacks = context.stacks()
        now = {r.rank: (stacks[r.rank], signs[r.rank]) for r in living if in_collective(stacks.get(r.rank, ()))}
        stood = [r for r in living if r.rank in now and self._before.get(r.rank) == now[r.rank]]
        # the signs are read anew: to write its stack was work
        self._before = {r.rank: (stacks[r.rank], processes.signs(r.pid)) for r in living if r.rank in now}
        return stood


@dataclass(kw_only=True)
class Stopper:
    """Ends attempts one after the other; signals that come meanwhile are looked after."""

    journal: Journal
    signals: Signals
    say: Callable[[str], None]
    asked: int | None = None
    """A stop signal that came while ranks were being stopped already."""
    last_pages: dict[int, Progress] = field(default_factory=dict)
    """The ranks' pages as they were at the end."""

    def stop(self, attempt: Attempt, signum: int, grace_s: float, why: str, *, ask: bool = True, hung: int | None = None) -> None:
        """End every rank of `attempt`: send `signum` (unless `ask` is False), wait up to `grace_s` seconds, kill what is left.

        `hung` is a rank that will not answer: killed at once. `why` is "restart", "signal" or "end", for the record.
        """
        context, begin = attempt.context, time.monotonic()
        if ask and any(not r.look() for r in attempt.ranks):
            self.journal.write(Stopping(signal=signal_name(signum), why=why))
            for r in attempt.ranks:
                # with a peer gone no save can come of it, and a rank that saves when it is asked to stop would try
                if r.rank == hung or (why == "restart" and r.page.read().saves_on_stop):
                    processes.kill_session(r.pid)
            context.ask(signum)
        stuck = self._wait(attempt, begin + grace_s, hopeless=why == "restart")
        self.last_pages = attempt.pages()
        killed = (*stuck, *(r.rank for r in attempt.ranks if not r.look()))
        context.close(signal.SIGKILL, 0)
        self.journal.write(Stopped(seconds=round(time.monotonic() - begin, 6), killed=killed))

    def kill(self, attempt: Attempt, why: str) -> None:
        """End every rank at once, without asking."""
        begin = time.monotonic()
        killed = tuple(r.rank for r in attempt.ranks if not r.look())
        for r in attempt.ranks:
            processes.kill_session(r.pid)
        attempt.context.wait_ended(_KILLED_WITHIN_S)
        self.journal.write(Stopping(signal="SIGKILL", why=why))
        self.journal.write(Stopped(seconds=round(time.monotonic() - begin, 6), killed=killed))

    def _wait(self, attempt: Attempt, until_t: float, *, hopeless: bool) -> list[int]:
        """Wait for the ranks' end; returns whom it killed: with a peer dead (`hopeless`), what waits in a collective waits for ever."""
        context, stuck, killed = attempt.context, Stuck(), list[int]()
        while not context.wait_ended(_until(until_t, _LOOK_S if hopeless else None), self.signals.fileno()):
            if hopeless:
                for r in stuck.look(context):
                    processes.kill_session(r.pid)
                    killed.append(r.rank)
            signum = self.signals.take()
            if signum is not None and signum in self.signals.stops:
                self.asked = self.asked or signum
                if signum in (signal.SIGINT, signal.SIGQUIT):
                    self.say(f"{signal_name(signum)} while ranks are being stopped: killing them now")
                    break
            elif signum is not None and signum in PASSED_ON:
                context.ask(signum)
            if time.monotonic() >= until_t:
                break
        return killed


def _until(end_t: float, at_most: float | None) -> float:
    left = max(end_t - time.monotonic(), 0)
    return left if at_most is None else min(left, at_most)
