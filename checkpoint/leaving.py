"""Leaving on request: a stop signal at any rank makes all ranks save the same step, and go."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from types import FrameType
from typing import Protocol

from torch.distributed import Store

from .. import progress

_BYTES = mmap.PAGESIZE
_ASKED, _AGREED = 0, 1
_LOOK_EVERY_S = 1.0


class Board(Protocol):
    """Where the ranks agree on the step after which all of them leave."""

    def due(self, step: int, asked: bool) -> bool:
        """Whether this rank, which has made `step` and was `asked` to stop or not, leaves now."""


class Alone:
    """One rank: nobody to agree with."""

    def due(self, step: int, asked: bool) -> bool:
        """At once."""
        return asked


class OnPage:
    """The ranks of one node: a page of memory that their keeper shares out."""

    def __init__(self, words: memoryview, *, leader: bool, alone: bool) -> None:
        """`leader` names the step; a rank that is `alone` need not wait for the next one."""
        self._words, self._leader, self._alone = words, leader, alone

    def due(self, step: int, asked: bool) -> bool:
        """The leader names the next step: nobody can be past it, because training it takes all of them."""
        words = self._words
        if asked:
            words[_ASKED] = 1
        if not words[_ASKED]:
            return False
        if self._leader and not words[_AGREED]:
            words[_AGREED] = step if self._alone else step + 1
        return bool(words[_AGREED]) and step >= words[_AGREED]


class OnStore:
    """Ranks on several nodes: the store through which they have met, asked once a second.

    Once somebody is asked to stop, every rank says that it now looks after each step; when all have, rank 0 names the next step. It does so
    before it trains that step itself, and nobody ends it without rank 0, so everybody sees the name in time.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` must be one that no other attempt uses."""
        self._store, self._rank, self._size = store, rank, size
        self._looks = False
        self._next_look = 0.0

    def due(self, step: int, asked: bool) -> bool:
        """Nothing is asked between two looks, unless this rank was asked itself."""
        if not asked and not self._looks and time.monotonic() < self._next_look:
            return False
        try:
            return self._look(step, asked)
        except RuntimeError:  # the store's host is gone: the ranks' collectives will say so, in their own words
            self._next_look = time.monotonic() + _LOOK_EVERY_S
            return False

    def _look(self, step: int, asked: bool) -> bool:
        store = self._store
        if asked and not self._looks:
            store.set("asked", "1")
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        if not self._looks and store.check(["asked"]):
            self._looks = True
            store.add("looking", 1)
        if not self._looks:
            return False
        if store.check(["agreed"]):
            return step >= int(store.get("agreed"))
        if self._rank == 0 and store.add("looking", 0) == self._size:
            store.set("agreed", str(step + 1))
        return False


class Leaving:
    """Watches for SIGTERM, unless the script does so itself, and agrees with the other ranks on a step.

    They agree without a collective, by what their loop has in common: no rank can be a whole step ahead of another. So it needs a loop
    whose ranks wait for each other in every step.
    """

    def __init__(self, board: Board | None) -> None:
        """`board`: None where it is still to come (`share`)."""
        self._board = board
        self._asked = False
        self._watching = False

    def watch(self) -> None:
        """Take SIGTERM over where nobody has."""
        mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if mine and not self._watching:
            signal.signal(signal.SIGTERM, self._ask)
            self._watching = True
            if (page := progress.page()) is not None:
                page.saves_on_stop(True)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:  # whoever asks again will not wait for a step
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._asked = True

    def share(self, board: Board) -> None:
        """Where to agree from now on."""
        self._board = board

    def due(self, step: int) -> bool:
        """Whether all ranks leave after this step."""
        return self._board is not None and self._board.due(step, self._asked)

    def stop(self) -> None:
        """The training is over: SIGTERM is the process's own again."""
        if self._watching and signal.getsignal(signal.SIGTERM) == self._ask:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if (page := progress.page()) is not None:
                page.saves_on_stop(False)
        self._watching = False


def shared_words(fd: int) -> memoryview:
    """The page behind a descriptor, which is closed."""
    mapped = mmap.mmap(fd, _BYTES)
    os.close(fd)
    return memoryview(mapped).cast("q")
