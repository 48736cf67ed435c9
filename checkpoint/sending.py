"""Sends what is whole in a keeper's memory to the keepers of the next nodes: in the background, one snapshot at a time, the newest."""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from .copies import Parcel, next_to_send, parcel_of
from .drain import Limiter
from .hosting import Host
from .memory import Memory
from .sealed import Broken, Connection
from .shelf import Snapshot

WHOLE = b"whole"
"""The last frame of a parcel."""
FRAME = 1 << 20
_CONNECT_S = 5.0
_SILENT_S = 60.0
"""How long the other side may take for one answer; it may have to make gigabytes of memory first."""
_LOOK_S = 0.25
_AGAIN_S = 5.0


@dataclass(frozen=True)
class Ring:
    """The nodes after this one, in the order of their ranks: the addresses and ports of their keepers."""

    key: bytes = b""
    next: tuple[tuple[str, int], ...] = ()


@dataclass
class _Task:
    """A snapshot that is being sent."""

    snapshot: Snapshot
    parcel: Parcel
    memories: dict[int, Memory]
    ring: Ring
    begun_t: float = field(default_factory=time.monotonic)
    failed: dict[str, str] = field(default_factory=dict)
    """Why it is not at a node, by its address."""
    nbytes: int = 0

    def __post_init__(self) -> None:
        """Memory that the shelf gives back meanwhile stays until this is done."""
        self.held = [memoryview(memory.map) for memory in self.memories.values()]

    @property
    def intact(self) -> bool:
        """Whether the memory was not used again."""
        return all(memory.holds == self.parcel.number for memory in self.memories.values())

    def release(self) -> None:
        """It is done."""
        for view in self.held:
            view.release()


class _InVain(Exception):
    """The snapshot is of no interest any more, or its memory has been used again."""


@dataclass
class Sender:
    """But for the thread's own work, everything happens on the keeper's main thread."""

    host: Host
    post: Callable[[Callable[[], None]], None]
    """Runs something on the main thread."""
    limiter: Limiter
    ring: Ring = Ring()
    running: _Task | None = None
    not_before: float = 0.0
    _said: dict[str, str] = field(default_factory=dict)
    """What was told last of a node, by its address."""
    _work: queue.SimpleQueue[_Task] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def meet(self, ring: Ring) -> None:
        """From now on these are the next nodes; what is under way to others is broken off."""
        self.ring, self.not_before, self._said = ring, 0.0, {}
        if self._thread is None and ring.next:
            self._thread = threading.Thread(target=self._run, name="goodrun-sender", daemon=True)
            self._thread.start()

    def tend(self) -> None:
        """Begin with what is to be sent next."""
        if self.running is not None or not self.ring.next or time.monotonic() < self.not_before:
            return
        for shelf in self.host.shelves.values():
            if (snapshot := next_to_send(shelf)) is not None:
                snapshot.sent = True
                self.running = _Task(snapshot, *parcel_of(shelf, snapshot), self.ring)
                self._work.put(self.running)
                return

    def _run(self) -> None:
        """The thread; it takes what CPU time training leaves."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            task = self._work.get()
            for at in task.ring.next:
                try:
                    self._send(task, at)
                except _InVain:
                    break
                except (OSError, Broken) as e:
                    task.failed[_name(at)] = str(e)
            self.post(partial(self._sent, task))

    def _send(self, task: _Task, at: tuple[str, int]) -> None:
        parcel = task.parcel
        with socket.create_connection(at, _CONNECT_S) as sock:
            call = _Call(sock, task.ring.key, lambda: self._check(task))
            head = parcel.to_bytes()
            call.say(str(len(head)).encode())
            for frame in _frames(memoryview(head)):
                call.say(frame)
            answer = json.loads(call.hear())
            if answer["why"] is not None:
                raise Broken(answer["why"])
            for part in parcel.parts:
                if part.rank in answer["lacking"]:
                    for view in part.views(task.memories[part.rank]):
                        for frame in _frames(view):
                            self.limiter.passing(len(frame))
                            call.say(frame)
                    task.nbytes += part.nbytes
            self._check(task)  # each byte of it was there until it had been read
            call.say(WHOLE)
            call.hear()

    def _check(self, task: _Task) -> None:
        if task.ring is not self.ring or not task.intact:
            raise _InVain

    def _sent(self, task: _Task) -> None:
        self.running, snapshot, intact = None, task.snapshot, task.intact
        task.release()
        if task.ring is not self.ring:
            snapshot.sent = False
            return
        if task.failed:
            snapshot.sent, self.not_before = False, time.monotonic() + _AGAIN_S
        elif not intact:
            task.failed = {"": "the next ones come before one is sent; take them less often"}
        else:
            seconds, nodes = round(time.monotonic() - snapshot.taken_t, 3), len(task.ring.next)
            self.host.record({"op": "copied", "step": snapshot.step, "seconds": seconds, "bytes": task.nbytes, "nodes": nodes})
        for node, why in task.failed.items():
            if self._said.get(node) != why:
                where = f" to {node}" if node else ""
                self.host.record({"op": "note", "why": f"snapshots are not copied{where}: {why} (step {snapshot.step})"})
        self._said = task.failed


class _Call:
    """A connection to another keeper, used by a thread that waits. `check` is called before anything is said, and raises to end it."""

    def __init__(self, sock: socket.socket, key: bytes, check: Callable[[], None]) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sock, self._check = sock, check
        self._connection = Connection(sock, key, accepted=False)
        while not self._connection.trusted:
            self._take()
            self._connection.flush()

    def say(self, body: bytes) -> None:
        self._check()
        self._connection.send(body)
        self._connection.flush()
        while self._connection.waits_to_write:
            self._wait(select.POLLOUT)
            self._connection.flush()

    def hear(self) -> bytes:
        while not (heard := self._take()):
            pass
        return heard[0]

    def _take(self) -> list[bytes]:
        self._wait(select.POLLIN)
        return list(self._connection.receive())

    def _wait(self, events: int) -> None:
        poll, end = select.poll(), time.monotonic() + _SILENT_S
        poll.register(self._sock, events)
        while not poll.poll(_LOOK_S * 1000):
            self._check()
            if time.monotonic() > end:
                raise Broken(f"no answer for {_SILENT_S:.0f} s")


def _frames(view: memoryview) -> Iterator[bytes]:
    return (bytes(view[at : at + FRAME]) for at in range(0, len(view), FRAME))


def _name(at: tuple[str, int]) -> str:
    return f"{at[0]}:{at[1]}"
