"""What a rank does to its own TCP connections: breaks them, has them lose, delay or send too little. It needs no rights, and no namespace.

The kernel asks a small program, attached to a socket, about each packet that comes in. One that is refused counts as lost on the way, the
sender's retransmissions included: to the peers, this is what a bad cable looks like.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

_ATTACH_FILTER, _DETACH_FILTER, _MAX_PACING_RATE = 26, 27, 47  # Linux's numbers; Python has no names for them
_UNSENT = 0x894B  # SIOCOUTQNSD
_LOAD, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
"""Where a filter finds a random number in place of the packet."""
_ALL, _NOTHING = 0xFFFFFFFF, 0

MAX_DELAY_MS = 190
"""The kernel itself lets a packet go that was held for 200 ms."""
_TICK_S = 0.001


def cut(*, to_store: bool) -> None:
    """Shut the connections to the store's port down, or all the others."""
    for _, s, port in _connections():
        if (port == int(os.environ["MASTER_PORT"])) is to_store and port:
            with contextlib.suppress(OSError):  # its peer was quicker
                s.shutdown(socket.SHUT_RDWR)


def lose(percent: int, for_s: float | None) -> None:
    """Lose so many of the packets that come in, for so long or for good; a listening socket hands that on to what it accepts."""
    threshold = min(0x1_0000_0000 * percent // 100, 0xFFFFFFFF)
    program = b"".join(
        [
            struct.pack("=HBBI", _LOAD, 0, 0, _RANDOM),
            struct.pack("=HBBI", _JUMP_IF_AT_LEAST, 0, 1, threshold),
            struct.pack("=HBBI", _RETURN, 0, 0, _ALL),
            struct.pack("=HBBI", _RETURN, 0, 0, _NOTHING),
        ]
    )
    held = ctypes.create_string_buffer(program, len(program))
    for _, s, _ in _connections():
        s.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(held)))
    if for_s is not None:
        _after(for_s, _DETACH_FILTER, 0)


def slow(kib_per_s: int, for_s: float | None) -> None:
    """Send no more than so many KiB a second on each connection."""
    for _, s, _ in _connections():
        s.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, kib_per_s << 10)
    if for_s is not None:
        _after(for_s, _MAX_PACING_RATE, -1)


def delay(ms: int, for_s: float | None) -> None:
    """Hold the end of each message back for so many milliseconds, MAX_DELAY_MS at most: to whom it is sent, the way is that much longer."""
    held = [_Held(number, ms / 1000) for number, _, port in _connections() if port]
    end = time.monotonic() + for_s if for_s is not None else math.inf
    threading.Thread(target=_hold, args=(held, end), name="goodrun-net-delay", daemon=True).start()


def _hold(held: list[_Held], end: float) -> None:
    while (now := time.monotonic()) < end and held:
        for connection in held:
            with contextlib.suppress(OSError):  # it was closed
                connection.look(now)
        time.sleep(_TICK_S)
    for connection in held:
        with contextlib.suppress(OSError):
            connection.cork(on=False)


class _Held:
    """A connection whose last, partly filled packet the kernel keeps (TCP_CORK) until this lets it go; what was sent meanwhile goes along.

    Its number is used as it is: a copy would keep the connection from being closed.
    """

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self._seconds = number, seconds
        self._since, self._unsent = 0.0, 0
        self.cork(on=True)

    def cork(self, *, on: bool) -> None:
        s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=self._number)
        try:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)
        finally:
            s.detach()

    def look(self, now: float) -> None:
        """Let go what has waited for long enough."""
        unsent = int.from_bytes(fcntl.ioctl(self._number, _UNSENT, bytes(4)), sys.byteorder)
        if not self._unsent or unsent < self._unsent:  # nothing waited, or there was more than the line takes at once: this is its end
            self._since = now
        elif now - self._since >= self._seconds:
            self.cork(on=False)
            self.cork(on=True)
            unsent = 0
        self._unsent = unsent


def _after(seconds: float, option: int, value: int) -> None:
    def mend() -> None:
        for _, s, _ in _connections():
            with contextlib.suppress(OSError):  # one that was made since has no filter
                s.setsockopt(socket.SOL_SOCKET, option, value)

    timer = threading.Timer(seconds, mend)
    timer.daemon = True
    timer.start()


def _connections() -> Iterator[tuple[int, socket.socket, int]]:
    """This process's TCP sockets: the number, the socket by a number of its own, and its peer's port; 0 for one that has no peer."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as s:
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                yield int(name), s, _peer(s)


def _peer(s: socket.socket) -> int:
    try:
        return int(s.getpeername()[1])
    except OSError:
        return 0
