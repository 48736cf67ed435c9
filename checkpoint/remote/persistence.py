"""Asking again: with growing pauses that differ from rank to rank, as long as the server wants to be left alone, and not for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import StorageTrouble
from .trouble import Kind, Verdict, judged

T = TypeVar("T")
_EIO = 5


@dataclass
class Persistence:
    """How often a request is made again. All that is asked at one storage shares one of these."""

    patience_s: float = 60.0
    """After so long a request has failed; whoever makes the whole save again begins anew."""
    first_s: float = 0.1
    longest_s: float = 8.0
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set where something better waits: then a request that fails is not made again."""
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[float, float], float] = random.uniform
    told: Callable[[str], None] = lambda words: None
    """Hears of each failure that is tried again."""

    def pause(self, tries: int, spent_s: float, verdict: Verdict) -> float | None:
        """How long to wait before try number `tries` + 1; None is never."""
        if verdict.kind is Kind.MISSING or verdict.kind is Kind.REFUSED or self.hurry.is_set():
            return None
        if verdict.kind is Kind.EXPIRED and tries > 3:
            return None
        wanted = min(self.first_s * 2 ** (tries - 1), self.longest_s)
        pause = self.draw(wanted / 2, wanted)
        if verdict.after_s is not None:
            pause = max(pause, verdict.after_s)
        return pause if spent_s + pause <= self.patience_s else None

    def ask(self, act: Callable[[], T], renew: Callable[[], None], where: str) -> T:
        """Do it until it is done. Raises FileNotFoundError where there is no such object, else StorageTrouble."""
        begin, tries = self.clock(), 0
        while True:
            tries += 1
            try:
                return act()
            except Exception as e:  # whatever a client library raises: it is judged here, and goes no further as it is
                verdict = judged(e)
            if verdict.kind is Kind.MISSING:
                raise FileNotFoundError(2, "No such object", where)
            if verdict.kind is Kind.EXPIRED:
                renew()
            pause = self.pause(tries, self.clock() - begin, verdict)
            if pause is None:
                raise StorageTrouble(_EIO, verdict.words, where)
            self.told(verdict.words)
            self.hurry.wait(pause)
