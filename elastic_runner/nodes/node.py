"""An agent's part in the job's membership, over sockets: drives its `Member`, and its `Leader` where it holds an endpoint."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .gossip import Gossip
from .leader import Leader
from .link import Link
from .member import Changed, Ended, Formed, Member, Note
from .messages import Message, Ping, Propose, Status, encode
from .wires import OURS, Job, Wires

_CLOCKS = 40


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
            now = time.monotonic()
            for node in self.nodes:
                if calls or node.wires.stirred or now >= node.next_t:
                    node.wires.stirred = False
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
        self.wires = Wires(self, loop.selector, job, local)
        self.gossip = Gossip()
        self.trouble = ""
        """Why the last attempt to reach an endpoint failed, in words."""
        self.on_note: Callable[[Note], object] = lambda note: None
        """Called in the loop's thread, at once."""
        self.next_t = now
        self._loop = loop
        self._job = job
        self._clocks: deque[float] = deque(maxlen=_CLOCKS)
        self._tick_t = now

    def start(self) -> None:
        """Take an endpoint, if one is ours to take; called in the loop's thread."""
        self.wires.hold_one()
        self._loop.nodes.append(self)

    def close(self) -> None:
        """Close every socket."""
        self.wires.close()

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
        self.gossip.pump(self.wires.links)  # before anything that ends the job
        if now - self._tick_t >= self._job.timing.beat_s / 2:
            self._tick_t = now
            self.member.tick(now)
            if self.leader is not None:
                self.leader.tick(now)
            self._deliver(now)  # a farewell must be on its way before its connection is closed
            self._connect(now)
            self.wires.shed(now)
            if (k := self.member.led_by) is not None and k in self.wires.to:
                self.gossip.greet(self.wires.to[k])
        if self.leader is not None and self.leader.stirred:
            self.leader.tick(now, beat=False)
        self._deliver(now)
        self.wires.write()
        self.next_t = self._tick_t + self._job.timing.beat_s / 2

    def _connect(self, now: float) -> None:
        wanted = self.member.wanted(len(self._job.endpoints))
        for k in set(self.wires.to) - wanted:
            self.member.forget(k)
        self.wires.connect(set(self.wires.to) & wanted if self.member.over else wanted, self.member.held, now)

    def _deliver(self, now: float) -> None:
        """Carry what the member and the leader have said, also from the one to the other within this agent."""
        links, to = self.wires.links, self.wires.to
        while self.member.out or (self.leader is not None and (self.leader.out or self.leader.stirred)):
            said, self.member.out = self.member.out, []
            for k, message in said:
                if self.leader is not None and k == self.member.held:
                    self.leader.receive(OURS, message, now)
                elif k in to:
                    to[k].say(message)
            if self.leader is not None:
                if self.leader.stirred:
                    self.leader.tick(now, beat=False)
                answers, self.leader.out = self.leader.out, []
                self._spread(answers, now)
        for k in self.member.dropped:
            if k in to:
                to[k].close()
        self.member.dropped = []
        if self.leader is not None:
            for number in self.leader.dropped:
                if number in links:
                    links[number].close()
            self.leader.dropped = []
        notes, self.member.notes = self.member.notes, []
        for note in notes:
            self.tell(note)

    def _spread(self, said: list[tuple[int, Message]], now: float) -> None:
        proposed: Propose | None = None
        body = b""
        for number, message in said:
            if isinstance(message, Ping):
                message = replace(message, wall=time.time())
            if number == OURS:
                self.member.receive(self.member.held, message, now)
            elif number in self.wires.links:
                if message is not proposed:  # a round is long, and the same for all
                    body = encode(message)
                    proposed = message if isinstance(message, Propose) else None
                self.wires.links[number].say_raw(body)

    # -- what the connections bring ------------------------------------------------------------------------------------

    def holds(self, k: int) -> None:
        """We listen at endpoint `k` now: we may lead."""
        now, job = time.monotonic(), self._job
        self.member.held = k
        self.leader = Leader(self.member.node, len(job.endpoints), job.nnodes, job.timing, now, job.spares)
        self.member.receive(k, Status(self.member.node, False), now)

    def got(self, link: Link, message: Message) -> None:
        """A link brings a message."""
        now = time.monotonic()
        if self.gossip.got(link, message):
            return
        if link.k is not None:
            if isinstance(message, Ping):
                self._clocks.append(message.wall - time.time())
                self.member.behind_s = max(self._clocks)  # the ping that was on its way for the shortest time tells best
            self.member.receive(link.k, message, now)
        elif self.leader is not None:
            self.leader.receive(link.number, message, now)

    def came(self, link: Link) -> None:
        """An agent of the job has connected to us."""
        if self.leader is not None:
            self.leader.link_up(link.number)

    def went(self, link: Link, *, ended: bool) -> None:
        """The link of one that had connected to us is closed."""
        if self.leader is not None:
            self.leader.link_down(link.number, time.monotonic(), ended=ended)

    def lost(self, k: int, why: str, *, ended: bool) -> None:
        """Endpoint `k` cannot be reached, or no longer."""
        self.trouble = why
        self.member.link_down(k, time.monotonic(), ended=ended)

    def stranger(self, k: int) -> None:
        """Endpoint `k` is an address of ours, and something listens there that is no agent of this job."""
        host, port = self._job.endpoints[k]
        self.tell(Ended(reason=f"address already in use by something else than an agent of this job: {host}:{port}"))


__all__ = ["Changed", "Ended", "Formed", "Job", "Loop", "Node", "Note"]
