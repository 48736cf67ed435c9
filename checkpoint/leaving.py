"""Leaving on request: a stop signal at any rank makes all ranks save the same step, and go."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from types import FrameType

from .. import progress

_BYTES = mmap.PAGESIZE
_ASKED, _AGREED = 0, 1


class Leaving:
    """Watches for SIGTERM, unless the script does so itself, and agrees with the other ranks of the node on a step.

    They agree through one page of memory that the keeper shares out, without a collective: the first of them names the next step, and none
    can be past that one, because training it takes all of them. So it needs a loop whose ranks wait for each other in every step.
    """

    def __init__(self, *, leader: bool, alone: bool) -> None:
        """`leader` names the step; a rank that is `alone` need not wait for the next one."""
        self._leader, self._alone = leader, alone
        self._asked = False
        self._words: memoryview | None = None
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

    def share(self, words: memoryview) -> None:
        """The page that the ranks of this node share."""
        self._words = words

    def due(self, step: int) -> bool:
        """Whether all ranks leave after this step."""
        words = self._words
        if words is None:
            return self._asked and self._alone
        if self._asked:
            words[_ASKED] = 1
        if not words[_ASKED]:
            return False
        if self._leader and not words[_AGREED]:
            words[_AGREED] = step if self._alone else step + 1
        return bool(words[_AGREED]) and step >= words[_AGREED]

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
