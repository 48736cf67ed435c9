"""How ranks leave because somebody has asked them to: signals to the launcher, a scheduler's to one rank, another node that goes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from ..progress import Phase
from .attempt import Attempt, signal_name
from .options import RunConfig
from .recorder import Recorder
from .signals import PASSED_ON, Signals
from .stopping import Stopper

_LOOK_EVERY_S = 0.1
_LEAVE_WITHIN_S = 5.0


@dataclass(kw_only=True)
class Departure:
    """Obeys a stop signal, and tells a rank that leaves from one that fails."""

    config: RunConfig
    signals: Signals
    stopper: Stopper
    recorder: Recorder
    say: Callable[[str], None]
    passed_on: set[int] = field(default_factory=set)
    """Signals that every rank has got from the launcher; who dies of one has been asked to."""

    def signalled(self, attempt: Attempt, signum: int) -> None:
        """A signal came to the launcher; raises what `signals.raises` makes of a stop signal, once all ranks are gone."""
        if signum in self.signals.stops:
            self.stop(attempt, signum, ask=True)
        elif signum in PASSED_ON:
            self.passed_on.add(signum)
            self.recorder.notice(f"passed {signal_name(signum)} on to every rank")
            attempt.context.ask(signum)

    def stop(self, attempt: Attempt, signum: int, *, ask: bool) -> NoReturn:
        """End the attempt and the run: the ranks are sent the signal if `ask`, and have the grace period in any case."""
        grace = self.config.shutdown_timeout_s
        asked = signal.SIGTERM if signal_name(signum) == self.config.requeue_signal else signum  # it is SIGTERM that ranks save upon
        if ask:
            ranks = len(attempt.ranks)
            self.say(f"{signal_name(signum)}: asked {ranks} ranks to stop; they have {grace} s (a second Ctrl-C kills them now)")
        before = attempt.pages()
        self.recorder.progress(before)
        self.stopper.stop(attempt, asked, grace, "signal", ask=ask)
        self.recorder.saves.stopped(before, self.stopper.last_pages)
        raise self.signals.raises(signum)  # torch leaves the rendezvous open for the other nodes when this passes through it

    def obeyed(self, attempt: Attempt, rank: int) -> None:
        """Stop if that rank's end is no failure: a signal that was passed on killed it, or all have agreed on a step, saved and leave."""
        code = next((r.code for r in attempt.ranks if r.rank == rank), None)
        if code is not None and -code in self.passed_on:
            self.stop(attempt, -code, ask=False)
        if any(p.left_step >= 0 for p in attempt.pages().values()):
            self.stop(attempt, signal.SIGTERM, ask=False)

    def with_another(self, attempt: Attempt, world_size: int) -> bool:
        """Whether the ranks have saved and left because another node was asked to leave, and the job may go on with fewer nodes."""
        elastic = self.config.min_nodes < self.config.max_nodes and len(attempt.ranks) < world_size
        return elastic and any(p.left_step >= 0 for p in attempt.pages().values())

    def of_all(self, attempt: Attempt) -> None:
        """Another node is gone from a job that needs all: stop if the ranks here leave, too.

        A node that was asked to stop signs off as soon as its own ranks have left, which may be a moment earlier.
        """
        if self.config.min_nodes != self.config.max_nodes:
            return
        end = time.monotonic() + _LEAVE_WITHIN_S
        while True:
            pages = attempt.pages().values()
            if any(p.left_step >= 0 for p in pages):
                self.stop(attempt, signal.SIGTERM, ask=False)
            if all(p.phase is not Phase.SAVE for p in pages) or time.monotonic() > end:
                return
            time.sleep(_LOOK_EVERY_S)
