"""A connection in a selector: reads, writes, closes, and tells its owner what came of it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import suppress
from typing import Protocol

from ...checkpoint.sealed import Broken, Connection
from .messages import Garbled, Message, decode, encode

_UNPROVEN_S = 3.0
_LINGER_S = 2.0


class Owner(Protocol):
    """Who has links, and is told of what happens to them."""

    unsent: set[Link]
    stirred: bool

    def has(self, link: Link) -> bool:
        """Whether the link is still one of its links."""

    def trusted(self, link: Link) -> None:
        """The other side of a link has proved itself."""

    def got(self, link: Link, message: Message) -> None:
        """A link brings a message."""

    def finished(self, link: Link) -> None:
        """A link says nothing more, and is only read to its end."""

    def gone(self, link: Link, why: str, *, ended: bool, was_trusted: bool) -> None:
        """A link is closed."""

    def forget(self, link: Link) -> None:
        """A link that was finished before is closed."""


class Link:
    """A connection in the selector. `k` is the endpoint it leads to; None where the other side connected to us."""

    def __init__(self, owner: Owner, selector: selectors.BaseSelector, connection: Connection, number: int, k: int | None) -> None:
        self.connection = connection
        self.number = number
        self.k = k
        self.until_t = time.monotonic() + _UNPROVEN_S
        self._owner = owner
        self._selector = selector
        self._writes = True
        self._connecting = k is not None
        selector.register(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._happens)

    def say(self, message: Message) -> None:
        self.say_raw(encode(message))

    def say_raw(self, body: bytes) -> None:
        if self.connection.trusted and not self.connection.closing:
            try:
                self.connection.send(body)
                self._owner.unsent.add(self)
            except Broken as e:
                self.close(str(e))

    def write(self) -> None:
        if self._connecting:
            return
        try:
            self.connection.flush()
        except Broken as e:
            if not e.ended:  # else what it said last is still to be read
                self.close(str(e))
            return
        self._watch()

    def finish(self, now: float) -> None:
        """Say nothing more, but read to the end: to close with words unread would make the kernel throw away what was said last."""
        if not self.connection.trusted:
            self.close()
        elif not self.connection.closing:
            self.write()
            self.connection.closing, self.until_t = True, now + _LINGER_S
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_WR)
            self._owner.finished(self)

    def close(self, why: str = "closed", *, ended: bool = False) -> None:
        was_trusted = self.connection.trusted and not self.connection.closing
        with suppress(KeyError, ValueError):
            self._selector.unregister(self.connection.sock)
        self.connection.sock.close()
        if self.connection.closing:
            self._owner.forget(self)
        else:
            self._owner.gone(self, why, ended=ended, was_trusted=was_trusted)

    def _happens(self, events: int) -> None:
        if not self._owner.has(self):
            return
        self._owner.stirred = True
        if self._connecting:
            error = self.connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.close(words(error))
                return
            self._connecting = False
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if self.connection.waits_to_write:
                self.connection.flush()
        except Broken as e:
            self.close(str(e), ended=e.ended)
            return
        except Garbled as e:
            self.close(f"not understood: {e}")
            return
        if self._owner.has(self):
            self._watch()

    def _read(self) -> None:
        before = self.connection.trusted
        for body in self.connection.receive():
            if not before:
                before = True
                self._owner.trusted(self)
            if not self.connection.closing:
                self._owner.got(self, decode(body))
        if self.connection.trusted and not before:
            self._owner.trusted(self)

    def _watch(self) -> None:
        writes = self.connection.waits_to_write
        if writes != self._writes:
            self._writes = writes
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
            self._selector.modify(self.connection.sock, events, self._happens)


def words(error: int) -> str:
    """What an errno means."""
    return os.strerror(error)
