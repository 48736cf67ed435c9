"""How an attempt's ranks are ended: asked, given their time, killed; their helpers go with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import processes
from .attempt import Attempt, signal_name
from .events import Stopped, Stopping
from .journal import Journal
from .signals import PASSED_ON, Signals


@dataclass(kw_only=True)
class Stopper:
    """Ends attempts one after the other; signals that come meanwhile are looked after."""

    journal: Journal
    signals: Signals
    say: Callable[[str], None]
    asked: int | None = None
    """A stop signal that came while ranks were being stopped already."""

    def stop(self, attempt: Attempt, signum: int, grace_s: float, why: str, *, ask: bool = True, hung: int | None = None) -> None:
        """End every rank of `attempt`: send `signum` (unless `ask` is False), wait up to `grace_s` seconds, kill what is left.

        `hung` is a rank that will not answer: killed at once. `why` is "restart", "signal" or "end", for the record.
        """
        context, begin = attempt.context, time.monotonic()
        if ask and any(not r.look() for r in attempt.ranks):
            self.journal.write(Stopping(signal=signal_name(signum), why=why))
            for r in attempt.ranks:
                if r.rank == hung:
                    processes.kill_session(r.pid)
            context.ask(signum)
        self._wait(attempt, begin + grace_s)
        killed = tuple(r.rank for r in attempt.ranks if not r.look())
        context.close(signal.SIGKILL, 0)
        self.journal.write(Stopped(seconds=round(time.monotonic() - begin, 6), killed=killed))

    def _wait(self, attempt: Attempt, until_t: float) -> None:
        context = attempt.context
        while not context.wait_ended(max(until_t - time.monotonic(), 0), self.signals.fileno()):
            signum = self.signals.take()
            if signum is not None and signum in self.signals.stops:
                self.asked = self.asked or signum
                if signum in (signal.SIGINT, signal.SIGQUIT):
                    self.say(f"{signal_name(signum)} while ranks are being stopped: killing them now")
                    return
            if signum is not None and signum in PASSED_ON:
                context.ask(signum)
            if time.monotonic() >= until_t:
                return
