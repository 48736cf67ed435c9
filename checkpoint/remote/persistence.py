"""Asking again: with growing pauses that differ from rank to rank, as long as the server wants to be left alone, and not for ever."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from ..errors import StorageTrouble
from .trouble import Kind, Verdict, judged

T = TypeVar("T")
PATIENCE_S = 60.0
_RENEWALS = 3


@dataclass
class Persistence:
    """How often a request is made again. All that is asked of one kind of storage shares one of these, and so knows whether it is down."""

    patience_s: float = PATIENCE_S
    """After so long a request has failed; whoever makes the whole save may begin anew."""
    hurried_s: float = 5.0
    """The patience where something better waits, counted from the last answer that was any good."""
    first_s: float = 0.1
    longest_s: float = 4.0
    hurried: bool = False
    tell: Callable[[str], None] = lambda words: None
    """Hears that storage has been down for a while, and that it is back."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[float, float], float] = random.uniform
    _down_since: float | None = None
    _said: bool = False
    _lock: Lock = field(default_factory=Lock)

    def pause(self, tries: int, spent_s: float, verdict: Verdict) -> float | None:
        """How long to wait before the next try, after `tries` that took so long together; None is for ever."""
        if verdict.kind in (Kind.MISSING, Kind.REFUSED):
            return None
        wanted = min(self.first_s * 2.0 ** min(tries - 1, 16), self.longest_s)
        pause = self.draw(wanted / 2, wanted)
        if verdict.after_s is not None:
            pause = max(pause, verdict.after_s)
        if self.hurried:
            down = 0.0 if self._down_since is None else self.clock() - self._down_since
            return pause if down + pause <= self.hurried_s else None
        return pause if spent_s + pause <= self.patience_s else None

    def ask(self, act: Callable[[], T], renew: Callable[[], None], where: str) -> T:
        """Do it until it is done. Raises FileNotFoundError where there is no such object, else StorageTrouble."""
        begin, tries, renewals = self.clock(), 0, 0
        while True:
            tries += 1
            try:
                answer = act()
            except Exception as e:  # whatever a client library raises: it is judged here, and goes no further as it is
                verdict = judged(e)
            else:
                self._up()
                return answer
            if verdict.kind is Kind.MISSING:
                self._up()
                raise FileNotFoundError(errno.ENOENT, "No such object", where)
            self._down(verdict.words)
            renewals += verdict.kind is Kind.EXPIRED
            pause = self.pause(tries, self.clock() - begin, verdict)
            if pause is None or renewals > _RENEWALS:
                raise StorageTrouble(errno.EIO, verdict.words, where)
            if verdict.kind is Kind.EXPIRED:
                renew()
            self.sleep(pause)

    def _up(self) -> None:
        with self._lock:
            since, self._down_since = self._down_since, None
            said, self._said = self._said, False
        if said and since is not None:
            self.tell(f"storage answers again after {self.clock() - since:.0f} s")

    def _down(self, words: str) -> None:
        with self._lock:
            now = self.clock()
            self._down_since = self._down_since if self._down_since is not None else now
            first = not self._said and now - self._down_since >= self.hurried_s
            self._said = self._said or first
        if first:
            self.tell(f"storage has not answered for {now - self._down_since:.0f} s ({words}): training goes on, what is to be saved waits")
