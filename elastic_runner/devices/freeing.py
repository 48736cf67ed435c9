"""Waits for the memory of GPUs whose ranks have ended: the driver gives it back a moment later; a process left behind never does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .answers import Held
from .identity import Bound

_WITHIN_S = 10.0
_ANSWER_WITHIN_S = 1.0
_SAY_AFTER_S = 1.0
_LOOK_EVERY_S = 0.05
_SLACK = 128 << 20
"""More than a driver's own use moves by, and less than any CUDA context holds."""

Ask = Callable[[Sequence[str], float], Mapping[str, Held] | None]
"""Asks what is in use on devices, for so many seconds at most; None if there was no answer."""


class Freeing:
    """What each device had in use when the run first came to it, which other jobs may hold, and the waiting for no more than that."""

    def __init__(self, ask: Ask, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._say, self._clock = ask, say, clock
        self._first: dict[str, int] = {}

    def wait(self, devices: Sequence[Bound], within_s: float = _WITHIN_S) -> None:
        """Until no device has more in use than at first; past the limit it is said who holds it, and the run goes on."""
        begin, told = self._clock(), False
        while (held := self._ask([d.asked for d in devices], _ANSWER_WITHIN_S)) is not None:
            for name, now in held.items():
                self._first.setdefault(name, now.used)
            over = [d for d in devices if d.asked in held and held[d.asked].used > self._first[d.asked] + _SLACK]
            if not over:
                break
            waited_s = self._clock() - begin
            if waited_s > _SAY_AFTER_S and not told:
                told = True
                self._say(f"waiting for memory of {', '.join(d.words for d in over)} that the ranks before had")
            if waited_s > within_s:
                for d in over:
                    words = self._words(held[d.asked], self._first[d.asked])
                    self._say(f"{d.words}: {words} {within_s:.0f} s after its rank's end: going on")
                    self._first[d.asked] = held[d.asked].used  # it is not waited for a second time
                break
            time.sleep(_LOOK_EVERY_S)  # nothing announces that a driver has given memory back

    @staticmethod
    def _words(held: Held, first: int) -> str:
        who = ", ".join(f"pid {pid} ({_command(pid)})" for pid in held.pids) or "a process that the driver does not name"
        return f"{(held.used - first) / 2**30:.1f} GiB of its memory are still held by {who}"


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return words.strip()[:80] or "it has ended"
    except OSError:
        return "not of this container, or gone"
