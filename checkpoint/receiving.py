"""Takes in what the keepers of other nodes send: copies of their snapshots' parts. Who does not know the job's secret is not heard."""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from .copies import Parcel, arrived, room_for
from .hosting import Host
from .memory import Memory, available
from .sealed import Broken, Connection
from .sending import WHOLE
from .shelf import Shelf

T = TypeVar("T")
_UNPROVEN = 64
_UNPROVEN_S = 3.0
_SILENT_S = 60.0
_LARGEST_HEAD = 1 << 30


class _Refused(Exception):
    """The parcel is not taken, in words for the sender."""


@dataclass
class _Caller:
    """Another keeper, or a stranger."""

    connection: Connection
    heard_t: float
    head: bytearray | None = None
    parcel: Parcel | None = None
    room: dict[int, Memory] = field(default_factory=dict)
    to_fill: list[memoryview] = field(default_factory=list)
    """Where the next bytes belong."""


class Receiver:
    """Has a thread of its own; the shelves are looked at and changed on the keeper's main thread."""

    def __init__(self, host: Host, post: Callable[[Callable[[], None]], None]) -> None:
        """Nobody listens yet. `post` runs something on the main thread."""
        self._host, self._post = host, post
        self._callers: list[_Caller] = []
        self._thread: threading.Thread | None = None

    def listen(self, listener: socket.socket, key: bytes) -> None:
        """Hear those who call here, from now on; the socket becomes this object's."""
        if self._thread is not None:
            listener.close()
            return
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(listener, key), name="goodrun-receiver", daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket, key: bytes) -> None:
        """The thread; it takes what CPU time training leaves."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener, key))
        while True:
            for ready, _ in self._selector.select(1.0):
                ready.data()
            now = time.monotonic()
            for caller in list(self._callers):
                if now - caller.heard_t > (_SILENT_S if caller.connection.trusted else _UNPROVEN_S):
                    self._drop(caller)

    def _accept(self, listener: socket.socket, key: bytes) -> None:
        with suppress(OSError):
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            strange = [c for c in self._callers if not c.connection.trusted]
            if len(strange) >= _UNPROVEN:
                self._drop(strange[0])
            caller = _Caller(Connection(sock, key, accepted=True), time.monotonic())
            self._callers.append(caller)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, caller))
            with suppress(Broken):
                caller.connection.flush()

    def _hear(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return
        try:
            for body in caller.connection.receive():
                self._take(caller, body)
            caller.connection.flush()  # answers are short: the kernel takes them at once
        except (Broken, ValueError, KeyError, TypeError):  # gone, a stranger, or of another version
            self._drop(caller)
            return
        if caller.connection.trusted:
            caller.heard_t = time.monotonic()

    def _drop(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection.sock)
        caller.connection.sock.close()
        _close(caller)

    # -- a parcel ------------------------------------------------------------------------------------------------------

    def _take(self, caller: _Caller, body: bytes) -> None:
        if caller.head is None:
            size = int(body)
            if not 0 < size <= _LARGEST_HEAD:
                raise ValueError(size)
            caller.head = bytearray(size)
            caller.to_fill = [memoryview(caller.head)]
        elif caller.to_fill:
            self._fill(caller, body)
        elif caller.parcel is not None and body == WHOLE:
            self._keep(caller, caller.parcel)
        else:
            raise ValueError("a frame too many")

    def _fill(self, caller: _Caller, body: bytes) -> None:
        view = caller.to_fill[0]
        view[: len(body)] = body  # raises ValueError for too many
        caller.to_fill[0] = view[len(body) :]
        if len(caller.to_fill[0]) == 0:
            caller.to_fill.pop(0)
        if not caller.to_fill and caller.parcel is None:
            self._open(caller)

    def _open(self, caller: _Caller) -> None:
        """The description is here: say what is lacking, and make room for it."""
        assert caller.head is not None
        caller.parcel = parcel = Parcel.from_bytes(bytes(caller.head))
        why: str | None = None
        try:
            self._make_room(caller, parcel)
        except _Refused as e:
            why = str(e)
        for part in parcel.parts:
            if part.rank in caller.room:
                caller.to_fill += [view for view in part.views(caller.room[part.rank]) if len(view)]
        caller.connection.send(json.dumps({"why": why, "lacking": sorted(caller.room)}).encode())

    def _make_room(self, caller: _Caller, parcel: Parcel) -> None:
        found = self._ask(lambda: room_for(self._host.shelves.setdefault(parcel.directory, Shelf(parcel.directory)), parcel))
        if found is None:
            raise _Refused("its attempt was replaced")
        caller.room = {rank: memory for rank, memory in found.items() if memory is not None}
        for memory in caller.room.values():
            memory.holds = 0
        missing = {p.rank: p.shape.size for p in parcel.parts if p.rank in found and p.rank not in caller.room}
        size, left = sum(missing.values()), available()
        why = f"copies of {len(missing)} parts need {size >> 20} MiB of memory there"
        try:
            if left < size * 1.1:
                raise _Refused(f"{why} and {left >> 20} MiB are left")
            for rank, nbytes in missing.items():
                caller.room[rank] = Memory.create(nbytes)
        except OSError as e:
            _close(caller)
            raise _Refused(f"{why}: {e.strerror}") from None
        except _Refused:
            _close(caller)
            raise

    def _keep(self, caller: _Caller, parcel: Parcel) -> None:
        """All of it is here."""
        room, caller.room = caller.room, {}
        self._ask(lambda: arrived(self._host.shelves[parcel.directory], parcel, room))
        caller.connection.send(b"kept")
        caller.head = caller.parcel = None

    def _ask(self, look: Callable[[], T]) -> T:
        """What `look` returns on the main thread."""
        answer: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._post(lambda: answer.put(look()))
        return answer.get()


def _close(caller: _Caller) -> None:
    for view in caller.to_fill:
        view.release()
    for memory in caller.room.values():
        memory.close()
    caller.to_fill, caller.room = [], {}
