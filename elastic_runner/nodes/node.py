"""An agent's part in the job's membership, over sockets: drives its `Member`, and its `Leader` where it holds an endpoint."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .leader import Leader
from .link import Link, words
from .member import Changed, Ended, Formed, Member, Note
from .messages import Message, Ping, Propose, Status, encode
from .timing import Timing
from .wire import Connection

_OURS = 0
_RETRY_S = 0.2
_UNPROVEN = 1024
_STRANGE = 2
_CLOCKS = 40


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all nodes of a job are told alike."""

    key: bytes
    endpoints: tuple[tuple[str, int], ...]
    """Addresses (no names) and ports."""
    nnodes: tuple[int, int]
    timing: Timing = field(default_factory=Timing)
    spares: int | None = None


class Loop(threading.Thread):
    """The thread in which nodes live: one of them, or as many as a simulation wants."""

    def __init__(self) -> None:
        super().__init__(name="goodrun-nodes", daemon=True)
        self.selector = selectors.DefaultSelector()
        self.nodes: list[Node] = []
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self.selector.register(self._ours, selectors.EVENT_READ, None)
        self._stopping = False
        self.failed: BaseException | None = None

    def call(self, function: Callable[[], object]) -> None:
        """Have `function` called in the thread."""
        with self._lock:
            self._calls.append(function)
        with suppress(BlockingIOError, OSError):
            self._theirs.send(b"c")

    def stop(self) -> None:
        """End the thread, and close what it has open."""

        def end() -> None:
            self._stopping = True

        self.call(end)
        self.join()

    def run(self) -> None:
        """The loop."""
        try:
            self._run()
        except BaseException as e:  # the thread's boundary: whoever waits for it must learn that it is gone
            self.failed = e
            for node in self.nodes:
                node.tell(Ended(reason=f"the membership thread has failed: {type(e).__name__}: {e}"))
            raise
        finally:
            for node in self.nodes:
                node.close()
            self.selector.close()
            self._ours.close()
            self._theirs.close()

    def _run(self) -> None:
        while not self._stopping:
            wait = min((n.next_t for n in self.nodes), default=time.monotonic() + 1) - time.monotonic()
            for key, events in self.selector.select(max(wait, 0)):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._ours.recv(4096)
                else:
                    key.data(events)
            with self._lock:
                calls, self._calls = self._calls, []
            for function in calls:
                function()
            for node in self.nodes:
                node.turn()


class Node:
    """One agent. All but `notes` and `changed` is touched by the loop's thread alone."""

    def __init__(self, loop: Loop, job: Job, node: str, name: str, local: str = "") -> None:
        """`local` is the address that connections to others are made from; empty leaves it to the kernel."""
        now = time.monotonic()
        self.notes: list[Note] = []
        self.changed = threading.Condition()
        self.member = Member(node, name, job.timing, now)
        self.leader: Leader | None = None
        self.trouble = ""
        """Why the last attempt to reach an endpoint failed, in words."""
        self.on_note: Callable[[Note], object] = lambda note: None
        """Called in the loop's thread, at once."""
        self.next_t = now
        self.unsent: set[Link] = set()
        self._loop = loop
        self._job = job
        self._local = local
        self._listener: socket.socket | None = None
        self._links: dict[int, Link] = {}
        self._to: dict[int, Link] = {}
        self._again: dict[int, float] = {}
        self._taken: dict[int, int] = {}
        """Endpoints of this machine that somebody else holds, and how often in a row it has not answered as an agent of this job would."""
        self._count = _OURS
        self._clocks: deque[float] = deque(maxlen=_CLOCKS)
        self._tick_t = now

    def start(self) -> None:
        """Take an endpoint, if one is ours to take; called in the loop's thread."""
        for k in range(len(self._job.endpoints)):
            if self._hold(k):
                break
        self._loop.nodes.append(self)

    def close(self) -> None:
        """Close every socket."""
        for link in list(self._links.values()):
            link.close()
        if self._listener is not None:
            self._loop.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def tell(self, note: Note) -> None:
        """Give the agent a note."""
        with self.changed:
            self.notes.append(note)
            self.changed.notify_all()
        self.on_note(note)

    # -- a turn of the loop --------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what has become due."""
        now = time.monotonic()
        if now - self._tick_t >= self._job.timing.beat_s / 2:
            self._tick_t = now
            self.member.tick(now)
            if self.leader is not None:
                self.leader.tick(now)
            self._deliver(now)  # a farewell must be on its way before its connection is closed
            self._connect(now)
            self._shed(now)
        if self.leader is not None and self.leader.stirred:
            self.leader.tick(now, beat=False)
        self._deliver(now)
        unsent, self.unsent = self.unsent, set()
        for link in unsent:
            if link.number in self._links:
                link.write()
        self.next_t = self._tick_t + self._job.timing.beat_s / 2

    def _deliver(self, now: float) -> None:
        """Carry what the member and the leader have said, also from the one to the other within this agent."""
        while self.member.out or (self.leader is not None and (self.leader.out or self.leader.stirred)):
            said, self.member.out = self.member.out, []
            for k, message in said:
                if self.leader is not None and k == self.member.held:
                    self.leader.receive(_OURS, message, now)
                elif (to := self._to.get(k)) is not None:
                    to.say(message)
            if self.leader is not None:
                if self.leader.stirred:
                    self.leader.tick(now, beat=False)
                said, self.leader.out = self.leader.out, []
                self._spread(said, now)
        for k in self.member.dropped:
            if (to := self._to.get(k)) is not None:
                to.close()
        self.member.dropped = []
        if self.leader is not None:
            for link in self.leader.dropped:
                if link in self._links:
                    self._links[link].close()
            self.leader.dropped = []
        notes, self.member.notes = self.member.notes, []
        for note in notes:
            self.tell(note)

    def _spread(self, said: list[tuple[int, Message]], now: float) -> None:
        proposed: Propose | None = None
        body = b""
        for link, message in said:
            if isinstance(message, Ping):
                message = replace(message, wall=time.time())
            if link == _OURS:
                self.member.receive(self.member.held, message, now)
            elif link in self._links:
                if message is not proposed:  # a round is long, and the same for all
                    body = encode(message)
                    proposed = message if isinstance(message, Propose) else None
                self._links[link].say_raw(body)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _hold(self, k: int) -> bool:
        """Listen at endpoint `k`, where it is an address of this machine and nobody else does."""
        host, port = self._job.endpoints[k]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as e:
            listener.close()
            if e.errno == errno.EADDRINUSE:
                self._taken.setdefault(k, 0)
            return False
        listener.setblocking(False)
        now = time.monotonic()
        self._listener = listener
        self.member.held = k
        job = self._job
        self.leader = Leader(self.member.node, len(job.endpoints), job.nnodes, job.timing, now, job.spares)
        self._loop.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.member.receive(k, Status(self.member.node, False), now)
        return True

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                unproven = [x for x in self._links.values() if not x.connection.trusted and x.k is None]
                if len(unproven) >= _UNPROVEN:
                    unproven[0].close()
                self._link(sock, None)

    def _connect(self, now: float) -> None:
        wanted = self.member.wanted(len(self._job.endpoints))
        for k in list(self._to):
            if k not in wanted and k in self._to:
                self._to[k].finish(now)
                self.member.forget(k)
        for k in wanted - set(self._to) - {self.member.held}:
            if now < self._again.get(k, 0.0) or self.member.over:
                continue
            self._again[k] = now + _RETRY_S
            host, port = self._job.endpoints[k]
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            error = 0
            try:
                if self._local:
                    sock.bind((self._local, 0))
                error = sock.connect_ex((host, port))
            except OSError as e:
                error = e.errno or errno.EIO
            if error not in (0, errno.EINPROGRESS):
                sock.close()
                self.lost(k, f"{host}:{port}: {words(error)}", now, ended=False, refused=error == errno.ECONNREFUSED)
                continue
            self._to[k] = self._link(sock, k)

    def _link(self, sock: socket.socket, k: int | None) -> Link:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count += 1
        connection = Connection(sock, self._job.key, accepted=k is None)
        link = self._links[self._count] = Link(self, self._loop.selector, connection, self._count, k)
        return link

    def _shed(self, now: float) -> None:
        """Close connections that prove nothing, and those that were only kept to be read to their end."""
        for link in list(self._links.values()):
            if now > link.until_t and (link.connection.closing or not link.connection.trusted):
                link.close()

    def has(self, link: Link) -> bool:
        """Whether the link is still one of ours."""
        return link.number in self._links

    def finished(self, link: Link) -> None:
        """A link says nothing more: its place is free."""
        if link.k is not None and self._to.get(link.k) is link:
            del self._to[link.k]

    def forget(self, link: Link) -> None:
        """A link that was finished is closed."""
        self._links.pop(link.number, None)

    def got(self, link: Link, message: Message) -> None:
        """A link brings a message."""
        now = time.monotonic()
        if link.k is not None:
            if isinstance(message, Ping):
                self._clocks.append(message.wall - time.time())
                self.member.behind_s = max(self._clocks)  # the ping that was on its way for the shortest time tells best
            self.member.receive(link.k, message, now)
        elif self.leader is not None:
            self.leader.receive(link.number, message, now)

    def trusted(self, link: Link) -> None:
        """The other side of a link has proved itself."""
        if link.k is not None:
            self._taken.pop(link.k, None)
        if link.k is None and self.leader is not None:
            self.leader.link_up(link.number)

    def gone(self, link: Link, why: str, *, ended: bool, was_trusted: bool) -> None:
        """A link is closed."""
        now = time.monotonic()
        self._links.pop(link.number, None)
        if link.k is not None:
            if self._to.get(link.k) is link:
                del self._to[link.k]
            host, port = self._job.endpoints[link.k]
            self.lost(link.k, f"{host}:{port}: {why}", now, ended=ended and was_trusted, refused=why == words(errno.ECONNREFUSED))
        elif self.leader is not None:
            self.leader.link_down(link.number, now, ended=ended and was_trusted)

    def lost(self, k: int, why: str, now: float, *, ended: bool, refused: bool) -> None:
        """Endpoint `k` cannot be reached, or no longer."""
        self.trouble = why
        if k in self._taken and not refused and not ended:
            self._taken[k] += 1
            if self._taken[k] == _STRANGE:
                host, port = self._job.endpoints[k]
                self.tell(Ended(reason=f"address already in use by something else than an agent of this job: {host}:{port}"))
        self.member.link_down(k, now, ended=ended)
        if refused and self.member.held < 0:
            self._hold(k)  # the one who held it, on this machine, is gone


__all__ = ["Changed", "Ended", "Formed", "Job", "Loop", "Node", "Note"]
