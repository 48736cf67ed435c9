"""Keys from a terminal, one at a time, without the terminal showing them."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any

_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x03": "q", b"\x1bOA": "up", b"\x1bOB": "down"}


class Keys:
    """The keys pressed while the block runs; the terminal is as before afterwards. Without a terminal there are none."""

    def __enter__(self) -> Keys:
        """Take the terminal out of its line mode."""
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] = []
        self._typed = b""
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Give it back."""
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The next key by its name or letter; "" if none came in time."""
        if not self._typed:
            watched = [self._fd] if self._fd >= 0 else []
            if not select.select(watched, [], [], seconds)[0]:
                return ""
            self._typed = os.read(self._fd, 64)
        if not self._typed:
            self._fd = -1  # the terminal is gone
            return "q"
        for raw, name in _NAMES.items():
            if self._typed.startswith(raw):
                self._typed = self._typed[len(raw) :]
                return name
        key, self._typed = self._typed[:1].decode(errors="replace"), self._typed[1:]
        return key
