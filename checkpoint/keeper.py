"""The process of a node that holds snapshots in memory and makes them durable; it outlives the ranks. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from .catalogue import Found, fresh_name
from .drain import Abandoned, Drain, Limiter, Part, Work
from .errors import CheckpointError, CheckpointFenced
from .fence import Fence, Token
from .hosting import Guest, Host, say
from .kept import forget, kept_directory, upload_command
from .memory import PAGE
from .places import Where, located, storage_at
from .shelf import Shelf, Snapshot, State
from .storage import Disk
from .url import Url
from .wire import Gone, Line, Message, address_of, same_user

_ALONE_S = 20.0
"""How long a keeper that a rank has started waits for its first connection."""
_OTHERS_WITHIN_S = 2.0
_TELL_EVERY_S = 2.0


@dataclass
class _Running:
    """The snapshot that is being written."""

    shelf: Shelf
    snapshot: Snapshot
    work: Work
    known: dict[str, Found]
    given_up: str | None = None
    told_t: float = field(default_factory=time.monotonic)
    """When the launcher was last told how far it is."""
    lost: str = ""
    """Why its storage did not take it; it is being kept on this node's disk instead."""


@dataclass
class Keeper:
    """One loop on the main thread that talks and decides, and one thread that writes."""

    listener: socket.socket
    disk: Disk = field(default_factory=Disk)
    limiter: Limiter = field(default_factory=Limiter)
    patience_s: float = 60.0
    """How long storage across the network is asked again for one thing."""
    others_s: float = 60.0
    """How long other nodes may be silent once the ranks here are gone."""
    parent: int = -1
    """A descriptor that ends when the launcher does; -1: the keeper lives as long as ranks are connected."""
    running: _Running | None = None
    _done: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _work: queue.SimpleQueue[_Running | None] = field(default_factory=queue.SimpleQueue)
    _parent_gone: bool = False

    def __post_init__(self) -> None:
        """Nobody is here yet."""
        self.host = Host(self._post, self._newer, self._record)

    def run(self) -> None:
        """Serve until the launcher (or the last rank) is gone and everything whole is written."""
        born = time.monotonic()
        wake, self._waker = socket.socketpair()
        wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(1 << 12))
        if self.parent >= 0:
            self._selector.register(self.parent, selectors.EVENT_READ, self._parent_ends)
        writer = threading.Thread(target=self._writer, name="goodrun-drain", daemon=True)
        writer.start()
        met = False
        while not self._over(met, born):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            while not self._done.empty():
                self._done.get()()
            met = met or bool(self.host.guests)
            self._start_next()
            self._hurry()
            self._tell_progress()
        self.listener.close()  # whoever comes now finds nobody, and starts another
        self._work.put(None)
        writer.join()

    def _over(self, met: bool, born: float) -> bool:
        if self.running is not None or self.host.allocating or any(s.state is State.WAITING for s in self.host.snapshots()):
            return False
        if self.parent >= 0:
            return self._parent_gone
        return not self.host.guests and (met or time.monotonic() - born > _ALONE_S)

    def _patience(self) -> float | None:
        times = [s.not_before - time.monotonic() for s in self.host.snapshots() if s.state is State.WAITING]
        if self.running is None and times:
            return max(min(times), 0)
        if self.running is not None:
            return _TELL_EVERY_S
        return 1.0 if self.parent < 0 and not self.host.guests else None

    def _parent_ends(self) -> None:
        self._selector.unregister(self.parent)
        self._parent_gone = True
        for shelf in self.host.shelves.values():
            shelf.closing = True

    # -- talking -------------------------------------------------------------------------------------------------------

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

    def _newer(self, shelf: Shelf, token: Token) -> None:
        """This keeper serves both attempts: what the older one finished is the newer one's to commit."""
        running = self.running
        if running is not None and running.shelf is shelf and running.snapshot.token < token:
            running.work.fence.token = token
            if len(running.work.parts) < running.work.world_size:
                running.given_up = "a newer attempt has begun without the other nodes' parts"

    # -- writing -------------------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        if self.running is not None:
            return
        for shelf in self.host.shelves.values():
            snapshot = shelf.next(time.monotonic())
            if snapshot is not None:
                snapshot.state = State.WRITING
                self.running = _Running(shelf, snapshot, self._work_of(shelf, snapshot), shelf.jobs[snapshot.token].known)
                self._work.put(self.running)
                return
        self.host.settled()

    def _work_of(self, shelf: Shelf, snapshot: Snapshot) -> Work:
        job, directory = shelf.jobs[snapshot.token], located(shelf.directory)
        parts = {}
        for rank, (slot, values) in sorted(snapshot.given.items()):
            layout = job.layouts[snapshot.layout, rank]
            view = memoryview(layout.slots[slot].map)
            at = layout.shape.values_at
            parts[rank] = Part(rank, view[PAGE : PAGE + layout.shape.shard], layout.items, bytes(view[at : at + values]))
        entries, index, metadata = job.blobs.get(snapshot.layout, ((), b"", b""))
        return Work(
            directory=directory,
            name=fresh_name(snapshot.step, snapshot.token, snapshot.number),
            step=snapshot.step,
            world_size=job.world_size,
            parts=parts,
            first=0 in parts,
            fence=Fence(directory, shelf.token, disk=self.disk),
            keep=job.keep,
            torch=job.torch,
            entries=entries,
            index=index,
            metadata=metadata,
            fsize=job.fsize,
        )

    def _hurry(self) -> None:
        """Storage that is down is asked with less patience as soon as there is something newer to write."""
        running = self.running
        if running is not None and isinstance(running.work.directory, Url):
            from .remote.objects import persistence_at

            persistence_at(running.work.directory).hurried = running.shelf.superseded(running.snapshot) is not None

    def _record(self, message: Message) -> None:
        """One line to the launcher, if there is one; lost where it does not read, for nobody waits for it."""
        if self.parent >= 0:
            with suppress(OSError):
                os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")

    def _tell_progress(self) -> None:
        running, now = self.running, time.monotonic()
        if running is not None and now - running.told_t >= _TELL_EVERY_S:
            running.told_t, (done, total) = now, running.work.done
            self._record({"op": "writing", "step": running.snapshot.step, "done": done, "total": total})

    def _attend(self, running: _Running) -> None:
        """Have the ranks told when storage is down for a while."""
        if isinstance(running.work.directory, Url):
            from .remote.objects import persistence_at

            persistence = persistence_at(running.work.directory)
            persistence.patience_s = self.patience_s
            news = {"op": "trouble", "number": running.snapshot.number}
            tell = partial(self.host.tell, running.shelf, running.snapshot)
            persistence.tell = lambda words: self._post(lambda: tell(news | {"why": f"{running.work.directory}: {words}"}))

    def _post(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        self._waker.send(b"x")

    def _writer(self) -> None:
        """The thread that writes; it takes what CPU time training leaves, and holds the interpreter for moments only."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (running := self._work.get()) is not None:
            error: Exception | None = None
            path: Where | None = None
            try:
                self._attend(running)
                drain = self._drain(running)
                if running.lost:
                    path = drain.keep(running.work)
                else:
                    path = drain.write(running.work, lambda still_s, r=running: r.given_up or self._in_vain(r, still_s))  # type: ignore[misc]
            except Exception as e:  # whatever storage does: the ranks have to learn of it, and the keeper goes on
                error = e
            if path is not None:
                try:
                    if not running.lost:
                        drain.prune(running.work)
                    forget(located(running.shelf.directory), running.work.step - bool(running.lost))
                except (OSError, CheckpointError) as e:
                    say(f"old checkpoints in {running.work.directory} were not removed: {e}")
            self._post(partial(self._written, running, path, error))

    def _drain(self, running: _Running) -> Drain:
        known = running.known if not running.lost else None  # those are of the place that did not take it
        return Drain(storage_at(running.work.directory, self.disk), self.limiter, known)

    def _in_vain(self, running: _Running, still_s: float) -> str | None:
        """Other nodes are lost, too, if they stay silent when this one's ranks are gone; and ranks that begin anew do not wait for long."""
        if still_s > self.others_s and (self._parent_gone or not self.host.guests):
            return f"the ranks of this node are gone, and nothing has come from the other nodes for {self.others_s:.0f} s"
        guests = list(self.host.guests.values())
        asked = [g.asked_t for g in guests if g.asked_to_settle and g.directory == running.shelf.directory]
        if asked and time.monotonic() - min(asked) > _OTHERS_WITHIN_S:
            return f"the other nodes' parts have not come within {_OTHERS_WITHIN_S:.0f} s of a new attempt's beginning"
        return None

    def _written(self, running: _Running, path: Where | None, error: Exception | None) -> None:
        self.running = None
        shelf, snapshot, work = running.shelf, running.snapshot, running.work
        if running.lost:
            self._was_kept(running, path, error)
            return
        if path is not None:
            _release(work)
            snapshot.state = State.DURABLE
            self.host.tell(shelf, snapshot, {"op": "durable", "number": snapshot.number, "step": snapshot.step, "path": str(path)})
            return
        snapshot.tries += 1
        newer = shelf.superseded(snapshot)
        final = isinstance(error, CheckpointFenced | Abandoned) or newer is not None
        at = None if final else shelf.retry_at(snapshot, time.monotonic())
        why = str(error) if isinstance(error, CheckpointFenced) else f"step {snapshot.step} was not saved to {work.path}: {_words(error)}"
        if at is not None:
            _release(work)
            snapshot.state, snapshot.not_before = State.WAITING, at
            self.host.tell(shelf, snapshot, {"op": "trouble", "number": snapshot.number, "why": f"{why}; trying again"})
            return
        if not final and isinstance(work.directory, Url):
            running.lost = why
            directory = kept_directory(work.directory)
            kept = replace(work, directory=directory, fence=Fence(directory, shelf.token, disk=self.disk))
            self.running = replace(running, work=kept)
            self._work.put(self.running)
            return
        _release(work)
        snapshot.state = State.FAILED
        with suppress(OSError, CheckpointError):  # the save's own failure is what people have to read; the next commit clears leftovers
            self._drain(running).abandon(work)
        lost = {"op": "failed", "number": snapshot.number, "why": why, "fenced": isinstance(error, CheckpointFenced)}
        self.host.tell(shelf, snapshot, lost)


    def _was_kept(self, running: _Running, path: Where | None, error: Exception | None) -> None:
        _release(running.work)
        running.snapshot.state = State.FAILED
        url, message = located(running.shelf.directory), {"op": "failed", "number": running.snapshot.number, "kept": path is not None}
        if path is not None and isinstance(url, Url):
            some = running.work if len(running.work.parts) < running.work.world_size else None
            where = "" if some is None else f" (ranks {', '.join(map(str, some.parts))}; each node has its part, and a command of its own)"
            why = f"{running.lost}; it is kept at {path}{where}, and uploaded with: {upload_command(path, url)}"
        else:
            why = f"{running.lost}; and it could not be kept on this node's disk: {_words(error)}"
        self.host.tell(running.shelf, running.snapshot, message | {"why": why})


def _release(work: Work) -> None:
    for part in work.parts.values():
        part.shard.release()


def _words(error: Exception | None) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({os.path.basename(error.filename)})" if error.filename else "")
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


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
