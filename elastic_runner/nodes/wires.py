"""An agent's connections to the others: it listens at the endpoint it holds, and connects to those that it is told to."""

from __future__ import annotations

import errno
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ...checkpoint.sealed import Connection
from .link import Link, words
from .messages import Message
from .timing import Timing

OURS = 0
"""The number that stands for this agent itself where links are numbered."""
_RETRY_S = 0.2
_UNPROVEN = 1024
_STRANGE = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all nodes of a job are told alike."""

    key: bytes
    endpoints: tuple[tuple[str, int], ...]
    """Addresses (no names) and ports."""
    nnodes: tuple[int, int]
    timing: Timing = field(default_factory=Timing)
    spares: int | None = None


class Hearer(Protocol):
    """Who is told of what the connections bring."""

    def holds(self, k: int) -> None:
        """We listen at endpoint `k` now."""

    def got(self, link: Link, message: Message) -> None:
        """A link brings a message."""

    def came(self, link: Link) -> None:
        """An agent of the job has connected to us."""

    def went(self, link: Link, *, ended: bool) -> None:
        """The link of one that had connected to us is closed. `ended`: its process has ended, as far as the network tells."""

    def lost(self, k: int, why: str, *, ended: bool) -> None:
        """Endpoint `k` cannot be reached, or no longer."""

    def stranger(self, k: int) -> None:
        """Endpoint `k` is an address of ours, and something listens there that is no agent of this job."""


class Wires:
    """The links of one agent; touched by the loop's thread alone."""

    def __init__(self, hearer: Hearer, selector: selectors.BaseSelector, job: Job, local: str) -> None:
        """`local` is the address that connections to others are made from; empty leaves it to the kernel."""
        self.unsent: set[Link] = set()
        self.stirred = False
        """Whether anything has happened to a link."""
        self.links: dict[int, Link] = {}
        """By number."""
        self.to: dict[int, Link] = {}
        """By endpoint."""
        self._hearer = hearer
        self._selector = selector
        self._job = job
        self._local = local
        self._listener: socket.socket | None = None
        self._again: dict[int, float] = {}
        self._taken: dict[int, int] = {}
        """Endpoints of this machine that somebody else holds, and how often in a row it has not answered as an agent of this job would."""
        self._count = OURS

    def close(self) -> None:
        """Close every socket."""
        for link in list(self.links.values()):
            link.close()
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def hold_one(self) -> None:
        """Take an endpoint, if one is ours to take."""
        for k in range(len(self._job.endpoints)):
            if self._hold(k):
                break

    def write(self) -> None:
        """Send what was said."""
        unsent, self.unsent = self.unsent, set()
        for link in unsent:
            if link.number in self.links:
                link.write()

    def connect(self, wanted: set[int], held: int, now: float) -> None:
        """Have links to the `wanted` endpoints, but for our own, and to no others."""
        for k in set(self.to) - wanted:
            self.to[k].finish(now)
        for k in wanted - set(self.to) - {held}:
            if now >= self._again.get(k, 0.0):
                self._again[k] = now + _RETRY_S
                self._reach(k)

    def shed(self, now: float) -> None:
        """Close connections that prove nothing, and those that were only kept to be read to their end."""
        for link in list(self.links.values()):
            if now > link.until_t and (link.connection.closing or not link.connection.trusted):
                link.close()

    # -- what links tell -----------------------------------------------------------------------------------------------

    def has(self, link: Link) -> bool:
        """Whether the link is still one of ours."""
        return link.number in self.links

    def finished(self, link: Link) -> None:
        """A link says nothing more: its place is free."""
        if link.k is not None and self.to.get(link.k) is link:
            del self.to[link.k]

    def forget(self, link: Link) -> None:
        """A link that was finished is closed."""
        self.links.pop(link.number, None)

    def got(self, link: Link, message: Message) -> None:
        """A link brings a message."""
        self._hearer.got(link, message)

    def trusted(self, link: Link) -> None:
        """The other side of a link has proved itself."""
        if link.k is not None:
            self._taken.pop(link.k, None)
        else:
            self._hearer.came(link)

    def gone(self, link: Link, why: str, *, ended: bool, was_trusted: bool) -> None:
        """A link is closed."""
        self.links.pop(link.number, None)
        if link.k is None:
            self._hearer.went(link, ended=ended and was_trusted)
            return
        if self.to.get(link.k) is link:
            del self.to[link.k]
        self._lost(link.k, why, ended=ended and was_trusted, refused=why == words(errno.ECONNREFUSED))

    # -- how -----------------------------------------------------------------------------------------------------------

    def _lost(self, k: int, why: str, *, ended: bool, refused: bool) -> None:
        if k in self._taken and not refused and not ended:
            self._taken[k] += 1
            if self._taken[k] == _STRANGE:
                self._hearer.stranger(k)
        host, port = self._job.endpoints[k]
        self._hearer.lost(k, f"{host}:{port}: {why}", ended=ended)
        if refused and self._listener is None:
            self._hold(k)  # the one who held it, on this machine, is gone

    def _hold(self, k: int) -> bool:
        """Listen at endpoint `k`, where it is an address of this machine and nobody else does."""
        host, port = self._job.endpoints[k]
        try:
            listener = socket.create_server((host, port), family=family_of(host), backlog=1024)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                self._taken.setdefault(k, 0)
            return False
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._hearer.holds(k)
        return True

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        self.stirred = True
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                unproven = [x for x in self.links.values() if not x.connection.trusted and x.k is None]
                if len(unproven) >= _UNPROVEN:
                    unproven[0].close()
                self._link(sock, None)

    def _reach(self, k: int) -> None:
        host, port = self._job.endpoints[k]
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        sock.setblocking(False)
        error = 0
        try:
            if self._local:
                sock.bind((self._local, 0))
            error = sock.connect_ex((host, port))
        except OSError as e:
            error = e.errno or errno.EIO
        if error in (0, errno.EINPROGRESS):
            self.to[k] = self._link(sock, k)
        else:
            sock.close()
            self._lost(k, words(error), ended=False, refused=error == errno.ECONNREFUSED)

    def _link(self, sock: socket.socket, k: int | None) -> Link:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count += 1
        connection = Connection(sock, self._job.key, accepted=k is None)
        link = self.links[self._count] = Link(self, self._selector, connection, self._count, k)
        return link


def family_of(host: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
