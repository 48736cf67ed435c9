"""The process of a node that holds snapshots in memory and makes them durable; it outlives the ranks. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import queue
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from .drain import Limiter
from .hosting import Guest, Host
from .memory import PAGE
from .receiving import Receiver
from .sending import Ring, Sender
from .shelf import State
from .storage import Disk
from .wire import Gone, Line, Message, address_of, same_user
from .writing import TELL_EVERY_S, Writer

WELL = struct.Struct("=q")
_ALONE_S = 20.0
"""How long a keeper that a rank has started waits for its first connection."""


@dataclass
class Keeper:
    """One loop on the main thread that talks and decides; the writer has a thread that writes."""

    listener: socket.socket
    disk: Disk = field(default_factory=Disk)
    limiter: Limiter = field(default_factory=Limiter)
    patience_s: float = 60.0
    """How long storage across the network is asked again for one thing."""
    others_s: float = 60.0
    """How long other nodes may be silent once the ranks here are gone."""
    parent: int = -1
    """A descriptor that ends when the launcher does, and on which it says up to which step its devices were well, as a `WELL` each time.

    -1: the keeper lives as long as ranks are connected.
    """
    _done: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        """Nobody is here yet."""
        self.host = Host(self._post, lambda shelf, token: self.writer.newer(shelf, token), self._record, self._ring)
        self.writer = Writer(self.host, self._post, self.disk, self.limiter, self.patience_s, self.others_s)
        self.sender = Sender(self.host, self._post, Limiter(self.limiter.rate))
        self.receiver = Receiver(self.host, self._post)

    def run(self) -> None:
        """Serve until the launcher (or the last rank) is gone and everything whole is written."""
        born = time.monotonic()
        wake, self._waker = socket.socketpair()
        wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(1 << 12))
        if self.parent >= 0:
            self._selector.register(self.parent, selectors.EVENT_READ, self._parent_speaks)
        self.writer.start()
        met = False
        while not self._over(met, born):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            while not self._done.empty():
                self._done.get()()
            met = met or bool(self.host.guests)
            self.writer.tend()
            self.sender.tend()
        self.listener.close()  # whoever comes now finds nobody, and starts another
        self.writer.finish()

    def _over(self, met: bool, born: float) -> bool:
        if self.writer.running is not None or self.host.allocating or any(s.state is State.WAITING for s in self.host.snapshots()):
            return False
        if self.parent >= 0:
            return self.writer.orphaned
        return not self.host.guests and (met or time.monotonic() - born > _ALONE_S)

    def _patience(self) -> float | None:
        now = time.monotonic()
        times = [s.not_before - now for s in self.host.snapshots() if s.state is State.WAITING and self.writer.running is None]
        times += [self.sender.not_before - now] if self.sender.not_before > now else []
        if times:
            return max(min(times), 0)
        if self.writer.running is not None:
            return TELL_EVERY_S
        return 1.0 if self.parent < 0 and not self.host.guests else None

    def _parent_speaks(self) -> None:
        if said := os.read(self.parent, PAGE):
            [self.writer.well] = WELL.unpack(said[-WELL.size :])
            return
        self._selector.unregister(self.parent)
        self.writer.orphaned = True
        for shelf in self.host.shelves.values():
            shelf.closing = True

    def _ring(self, m: Message, fds: list[int]) -> None:
        """The launcher tells who comes next, and gives the socket at which the other nodes' keepers call."""
        key = bytes.fromhex(m["key"])
        self.receiver.listen(socket.socket(fileno=fds[0]), key)
        self.sender.meet(Ring(key, tuple((host, port) for host, port in m["next"])))

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        if not same_user(sock):
            sock.close()
            return
        guest = Guest(Line(sock))
        self.host.guests[guest.line.fileno()] = guest
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, guest))

    def _hear(self, guest: Guest) -> None:
        try:
            self.host.hear(guest)
        except Gone:
            self._selector.unregister(guest.line.sock)
            self.host.leaves(guest)

    def _record(self, message: Message) -> None:
        """One line to the launcher, if there is one; lost where it does not read, for nobody waits for it."""
        if self.parent >= 0:
            with suppress(OSError):
                os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")

    def _post(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        self._waker.send(b"x")


def listen(name: str) -> socket.socket | None:
    """A socket at the keeper's address; None if another keeper is there already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(address_of(name))
    except OSError:
        listener.close()
        return None
    listener.listen(256)
    return listener


def main(disk: Disk | None = None) -> None:
    """Keep for the ranks of this node."""
    parser = argparse.ArgumentParser(prog="goodrun-keeper")
    parser.add_argument("name")
    parser.add_argument("--parent", type=int, default=-1)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="MiB per second; 0 is no limit")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that storage across the network is asked again for one thing")
    parser.add_argument("--others", type=float, default=60.0, help="seconds that other nodes may be silent once the ranks here are gone")
    args = parser.parse_args()
    # meant for the job (a scheduler sends them to every process of it): what is whole in memory is to be written all the same
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if args.parent >= 0:
        os.set_blocking(sys.stdout.fileno(), False)
    listener = listen(args.name)
    if listener is not None:
        Keeper(listener, disk or Disk(), Limiter(args.bandwidth * (1 << 20)), args.patience, args.others, args.parent).run()


if __name__ == "__main__":
    main()
