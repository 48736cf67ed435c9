"""The process of a node that holds snapshots in memory and makes them durable; it outlives the ranks. Standard library only."""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .catalogue import fresh_name
from .drain import Abandoned, Drain, Limiter, Part, Work
from .errors import CheckpointError, CheckpointFenced
from .fence import Fence, Token, fenced
from .memory import PAGE, Memory, SlotShape, available
from .retention import Keep
from .shelf import Job, Layout, Shelf, Snapshot, State
from .storage import Disk
from .wire import Gone, Line, Message, address_of, same_user

_NOBODY = Token(0, 0)
_ALONE_S = 20.0
"""How long a keeper that a rank has started waits for its first connection."""


@dataclass
class Guest:
    """A rank that is connected."""

    line: Line
    directory: str = ""
    token: Token = _NOBODY
    rank: int = -1
    asked_to_settle: bool = False


@dataclass
class _Running:
    """The snapshot that is being written."""

    shelf: Shelf
    snapshot: Snapshot
    work: Work
    given_up: str | None = None


@dataclass
class Keeper:
    """One loop on the main thread that talks and decides, and one thread that writes."""

    listener: socket.socket
    disk: Disk = field(default_factory=Disk)
    limiter: Limiter = field(default_factory=Limiter)
    parent: int = -1
    """A descriptor that ends when the launcher does; -1: the keeper lives as long as ranks are connected."""
    shelves: dict[str, Shelf] = field(default_factory=dict)
    guests: dict[int, Guest] = field(default_factory=dict)
    running: _Running | None = None
    _done: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _work: queue.SimpleQueue[_Running | None] = field(default_factory=queue.SimpleQueue)
    _allocating: int = 0
    _parent_gone: bool = False

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
            met = met or bool(self.guests)
            self._start_next()
        self._work.put(None)
        writer.join()

    def _over(self, met: bool, born: float) -> bool:
        if self.running is not None or self._allocating or any(s.state is State.WAITING for s in self._all()):
            return False
        if self.parent >= 0:
            return self._parent_gone
        return not self.guests and (met or time.monotonic() - born > _ALONE_S)

    def _patience(self) -> float | None:
        times = [s.not_before - time.monotonic() for s in self._all() if s.state is State.WAITING]
        if self.running is None and times:
            return max(min(times), 0)
        return 1.0 if self.parent < 0 and not self.guests else None

    def _all(self) -> list[Snapshot]:
        return [s for shelf in self.shelves.values() for s in shelf.snapshots]

    def _parent_ends(self) -> None:
        self._selector.unregister(self.parent)
        self._parent_gone = True
        for shelf in self.shelves.values():
            shelf.closing = True

    # -- talking -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        if not same_user(sock):
            sock.close()
            return
        guest = Guest(Line(sock))
        self.guests[guest.line.fileno()] = guest
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, guest))

    def _hear(self, guest: Guest) -> None:
        try:
            guest.line.read()
            for message, raw, fds in guest.line.messages():
                self._obey(guest, message, raw, fds)
        except Gone:
            self._leaves(guest)

    def _leaves(self, guest: Guest) -> None:
        self._selector.unregister(guest.line.sock)
        del self.guests[guest.line.fileno()]
        guest.line.close()
        shelf = self.shelves.get(guest.directory)
        if shelf is None or guest.token not in shelf.jobs:
            return
        shelf.jobs[guest.token].gone[guest.rank] = True
        for snapshot in [s for s in shelf.snapshots if s.token == guest.token and s.state is State.COPYING and guest.rank not in s.given]:
            self._lost_rank(shelf, snapshot, guest.rank)

    def _lost_rank(self, shelf: Shelf, snapshot: Snapshot, rank: int) -> None:
        shelf.snapshots.remove(snapshot)
        why = f"step {snapshot.step} was not saved: rank {rank} left before it had copied its part"
        self._tell(shelf, snapshot, {"op": "failed", "number": snapshot.number, "why": why})

    def _obey(self, guest: Guest, m: Message, raw: bytes, fds: list[int]) -> None:
        op = m["op"]
        if op == "hello":
            self._hello(guest, m)
            return
        shelf = self.shelves.get(m.get("directory", guest.directory))
        if op == "settle":
            guest.directory, guest.asked_to_settle = m["directory"], True
            self._settled()
        elif shelf is None:
            guest.line.send({"op": "nothing"})
        elif op == "newest":
            self._newest(guest, shelf)
        elif guest.token < shelf.token:
            why = fenced(Path(shelf.directory), shelf.token, guest.token)
            guest.line.send({"op": "failed", "number": m.get("number", 0), "why": why, "fenced": True})
        elif op == "layout":
            self._layout(guest, shelf, m, raw, fds)
        elif op == "given":
            self._given(guest, shelf, m)
        elif op == "fault":
            self._fault(guest, shelf, m)
        elif op == "may":
            self._may(guest, shelf, m)
        elif op == "closing":
            shelf.closing = True
            for snapshot in shelf.snapshots:
                snapshot.not_before = min(snapshot.not_before, time.monotonic() + 0.25)

    def _hello(self, guest: Guest, m: Message) -> None:
        shelf = self.shelves.setdefault(m["directory"], Shelf(m["directory"]))
        guest.directory, guest.token, guest.rank, guest.asked_to_settle = m["directory"], Token(*m["token"]), m["rank"], False
        if guest.token >= shelf.token:
            job = Job(guest.token, m["world"], tuple(m["local"]), Keep(**m["keep"]), m["torch"], m["fsize"])
            shelf.closing = False
            for dropped in shelf.begins(job):
                self._tell(shelf, dropped, {"op": "failed", "number": dropped.number, "why": "its attempt was replaced"})
            shelf.jobs[guest.token].gone.pop(guest.rank, None)
            if self.running is not None and self.running.shelf is shelf and self.running.snapshot.token < guest.token:
                # This keeper serves both attempts: what the older one finished is the newer one's to commit.
                self.running.work.fence.token = guest.token
                if not set(range(self.running.work.world_size)) <= set(self.running.work.parts):
                    self.running.given_up = "a newer attempt has begun without the other nodes' parts"
        known = shelf.jobs.get(guest.token)
        if known is None:  # of an attempt that was replaced; it will be told when it saves
            guest.line.send({"op": "welcome", "pid": os.getpid()})
            return
        if known.page is None:
            known.page = Memory.create(PAGE)
        guest.line.send({"op": "welcome", "pid": os.getpid()}, fds=(known.page.fd,))

    def _layout(self, guest: Guest, shelf: Shelf, m: Message, raw: bytes, fds: list[int]) -> None:
        job = shelf.jobs[guest.token]
        shape = SlotShape(m["shard"], m["values"])
        layout = Layout(shape, tuple((at, n, tuple(seals)) for at, n, seals in m["items"]))
        job.layouts[m["layout"], guest.rank] = layout
        if guest.rank == 0:
            split = m["index"]
            job.blobs = {m["layout"]: (tuple(m["entries"]), raw[:split], raw[split:])}
        if fds:  # a keeper that took the place of another: the rank has the slots already
            layout.slots = {slot: Memory(fd, shape.size) for slot, fd in enumerate(fds)}
            return
        found = [shelf.take_spare(shape.size) for _ in range(2)]
        self._allocating += 1
        threading.Thread(target=self._allocate, args=(guest, layout, m["layout"], [f for f in found if f is not None]), daemon=True).start()

    def _allocate(self, guest: Guest, layout: Layout, name: str, memories: list[Memory]) -> None:
        """In a thread of its own: the pages of a big slot take a while to come."""
        size, why = layout.shape.size, ""
        while len(memories) < 2:
            left = available()
            if left < size * 1.1:
                why = f"a snapshot of rank {guest.rank} needs {size >> 20} MiB of memory and {left >> 20} MiB are left"
                break
            try:
                memories.append(Memory.create(size))
            except OSError as e:
                why = f"a snapshot of rank {guest.rank} needs {size >> 20} MiB of memory: {e.strerror}"
                break
        self._post(lambda: self._allocated(guest, layout, name, memories, why))

    def _allocated(self, guest: Guest, layout: Layout, name: str, memories: list[Memory], why: str) -> None:
        self._allocating -= 1
        layout.slots = dict(enumerate(memories))
        with suppress(Gone):
            guest.line.send({"op": "slots", "layout": name, "n": len(memories), "why": why}, fds=tuple(m.fd for m in memories))

    def _given(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        snapshot = shelf.given(guest.token, m["number"], m["step"], m["layout"], guest.rank, m["slot"], m["values"])
        if snapshot.state is State.COPYING:
            job = shelf.jobs[guest.token]
            for rank in job.local:
                if rank in job.gone and rank not in snapshot.given:
                    self._lost_rank(shelf, snapshot, rank)
                    return

    def _fault(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        """A rank could not copy its part: the others' are of no use."""
        for snapshot in [s for s in shelf.snapshots if (s.token, s.number) == (guest.token, m["number"])]:
            shelf.snapshots.remove(snapshot)
        failed = Snapshot(m["number"], m["step"], guest.token, "", state=State.FAILED)
        self._tell(shelf, failed, {"op": "failed", "number": m["number"], "why": m["why"]})

    def _may(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        take, replaced = shelf.may(guest.token, m["number"], m["how"], m["slots"])
        if replaced is not None:
            shelf.snapshots.remove(replaced)
            why = f"step {replaced.step} was not saved: a newer snapshot took its place before it was written"
            self._tell(shelf, replaced, {"op": "failed", "number": replaced.number, "why": why, "replaced": True})
        guest.line.send({"op": "decided", "number": m["number"], "take": take})

    def _newest(self, guest: Guest, shelf: Shelf) -> None:
        snapshot = shelf.newest_whole()
        if snapshot is None:
            guest.line.send({"op": "nothing"})
            return
        job = shelf.jobs[snapshot.token]
        entries, index, _ = job.blobs[snapshot.layout]
        name = fresh_name(snapshot.step, snapshot.token, snapshot.number)
        head = {"op": "newest", "step": snapshot.step, "world": job.world_size, "token": snapshot.token, "name": name, "entries": entries}
        guest.line.send(head, raw=index)
        for rank, (slot, values) in sorted(snapshot.given.items()):
            layout = job.layouts[snapshot.layout, rank]
            message = {"op": "part", "rank": rank, "shard": layout.shape.shard, "values": values, "cap": layout.shape.values}
            guest.line.send(message, fds=(layout.slots[slot].fd,))

    def _tell(self, shelf: Shelf, snapshot: Snapshot, message: Message) -> None:
        """Tell every rank of the snapshot's attempt; where none is left, tell whoever reads the log."""
        heard = False
        for guest in list(self.guests.values()):
            if (guest.directory, guest.token) == (shelf.directory, snapshot.token):
                with suppress(Gone):
                    guest.line.send(message)
                    heard = True
        if not heard and message["op"] == "failed":
            say(message["why"])

    def _settled(self) -> None:
        for guest in list(self.guests.values()):
            shelf = self.shelves.get(guest.directory)
            busy = shelf is not None and any(s.state in (State.WAITING, State.WRITING) for s in shelf.snapshots)
            if guest.asked_to_settle and not busy:
                guest.asked_to_settle = False
                with suppress(Gone):
                    guest.line.send({"op": "settled"})

    # -- writing -------------------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        if self.running is not None:
            return
        for shelf in self.shelves.values():
            snapshot = shelf.next(time.monotonic())
            if snapshot is not None:
                snapshot.state = State.WRITING
                self.running = _Running(shelf, snapshot, self._work_of(shelf, snapshot))
                self._work.put(self.running)
                return
        self._settled()

    def _work_of(self, shelf: Shelf, snapshot: Snapshot) -> Work:
        job, directory = shelf.jobs[snapshot.token], Path(shelf.directory)
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

    def _post(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        self._waker.send(b"x")

    def _writer(self) -> None:
        """The thread that writes; it takes what CPU time training leaves, and holds the interpreter for moments only."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        drain = Drain(self.disk, self.limiter)
        while (running := self._work.get()) is not None:
            error: Exception | None = None
            path: Path | None = None
            try:
                path = drain.write(running.work, lambda r=running: r.given_up)  # type: ignore[misc]
            except Exception as e:  # whatever storage does: the ranks have to learn of it, and the keeper goes on
                error = e
            if path is not None:
                try:
                    drain.prune(running.work)
                except (OSError, CheckpointError) as e:
                    say(f"old checkpoints in {running.work.directory} were not removed: {e}")
            self._post(partial(self._written, running, path, error))

    def _written(self, running: _Running, path: Path | None, error: Exception | None) -> None:
        self.running = None
        shelf, snapshot, work = running.shelf, running.snapshot, running.work
        for part in work.parts.values():
            part.shard.release()
        if path is not None:
            snapshot.state = State.DURABLE
            self._tell(shelf, snapshot, {"op": "durable", "number": snapshot.number, "step": snapshot.step, "path": str(path)})
            return
        snapshot.tries += 1
        newer = shelf.superseded(snapshot)
        final = isinstance(error, CheckpointFenced | Abandoned) or newer is not None
        at = None if final else shelf.retry_at(snapshot, time.monotonic())
        why = str(error) if isinstance(error, CheckpointFenced) else f"step {snapshot.step} was not saved to {work.path}: {_words(error)}"
        if at is not None:
            snapshot.state, snapshot.not_before = State.WAITING, at
            self._tell(shelf, snapshot, {"op": "trouble", "number": snapshot.number, "why": f"{why}; trying again"})
            return
        snapshot.state = State.FAILED
        with suppress(OSError, CheckpointError):  # the save's own failure is what people have to read; the next commit clears leftovers
            Drain(self.disk, self.limiter).abandon(work)
        lost = {"op": "failed", "number": snapshot.number, "why": why, "fenced": isinstance(error, CheckpointFenced)}
        self._tell(shelf, snapshot, lost)


def _words(error: Exception | None) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({os.path.basename(error.filename)})" if error.filename else "")
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def say(text: str) -> None:
    """One line to whoever reads the log."""
    with suppress(OSError):
        print(f"goodrun: {text}", file=sys.stderr, flush=True)


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
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGHUP):  # meant for the job: what is whole in memory is to be written all the same
        signal.signal(signum, signal.SIG_IGN)
    listener = listen(args.name)
    if listener is not None:
        Keeper(listener, disk or Disk(), Limiter(args.bandwidth * (1 << 20)), args.parent).run()


if __name__ == "__main__":
    main()
