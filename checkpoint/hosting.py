"""The ranks that are connected to a keeper: what they ask for and tell, and what they are told. Standard library only."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from .errors import CheckpointError
from .fence import Token, fenced
from .manifest import read_manifest
from .memory import PAGE, Memory, SlotShape, available
from .places import located
from .retention import Keep
from .shelf import Job, Layout, Shelf, Snapshot, State
from .vouching import read_word
from .wire import Gone, Line, Message

_NOBODY = Token(0, 0)


@dataclass
class Guest:
    """A rank that is connected."""

    line: Line
    directory: str = ""
    token: Token = _NOBODY
    rank: int = -1
    asked_to_settle: bool = False
    asked_t: float = 0.0


@dataclass
class Host:
    """Keeps the shelves as the ranks' messages have it. Everything but the making of memory happens on the keeper's main thread."""

    post: Callable[[Callable[[], None]], None]
    """Runs something on the main thread."""
    newer: Callable[[Shelf, Token], None]
    """Called when a newer attempt takes a directory over."""
    record: Callable[[Message], None]
    """Tells the launcher, which keeps the record."""
    ring: Callable[[Message, list[int]], None]
    """Takes in the launcher's word on which nodes come next."""
    shelves: dict[str, Shelf] = field(default_factory=dict)
    guests: dict[int, Guest] = field(default_factory=dict)
    allocating: int = 0

    def snapshots(self) -> list[Snapshot]:
        """All that lie in memory."""
        return [s for shelf in self.shelves.values() for s in shelf.snapshots]

    def hear(self, guest: Guest) -> None:
        """Take in what a rank has sent, and do it; raises Gone when the rank is."""
        guest.line.read()
        for message, raw, fds in guest.line.messages():
            self._obey(guest, message, raw, fds)

    def leaves(self, guest: Guest) -> None:
        """A rank has hung up, or died."""
        del self.guests[guest.line.fileno()]
        guest.line.close()
        shelf = self.shelves.get(guest.directory)
        if shelf is None or guest.token not in shelf.jobs:
            return
        still = ((g.directory, g.token, g.rank) for g in self.guests.values())
        if (guest.directory, guest.token, guest.rank) in still:
            return  # it has a newer line: a script made a second checkpointer of this directory
        shelf.jobs[guest.token].gone[guest.rank] = True
        for snapshot in [s for s in shelf.snapshots if s.token == guest.token]:
            self._unless_lost(shelf, snapshot)

    def _unless_lost(self, shelf: Shelf, snapshot: Snapshot) -> None:
        """A snapshot can no longer become whole where a rank has left without giving its part."""
        if snapshot.state is not State.COPYING or snapshot.doubted:
            return
        job = shelf.jobs[snapshot.token]
        gone = [rank for rank in job.local if rank in job.gone and rank not in snapshot.given]
        if gone:
            shelf.snapshots.remove(snapshot)
            why = f"step {snapshot.step} was not saved: rank {gone[0]} left before it had copied its part"
            self.tell(shelf, snapshot, {"op": "failed", "number": snapshot.number, "why": why})

    def _obey(self, guest: Guest, m: Message, raw: bytes, fds: list[int]) -> None:
        op = m["op"]
        if op == "hello":
            self._hello(guest, m)
            return
        if op == "ring":
            self.ring(m, fds)
            return
        shelf = self.shelves.get(m.get("directory", guest.directory))
        if op == "settle":
            guest.directory, guest.asked_to_settle, guest.asked_t = m["directory"], True, time.monotonic()
            self.settled()
        elif shelf is None:
            guest.line.send({"op": "nothing"})
        elif op == "newest":
            newest = shelf.newest_whole()
            self._offer(guest, shelf, newest, Token(*m["by"]), None if newest is None else _taken_over(shelf, newest))
        elif op == "held":
            shelf.claimed = max(shelf.claimed, Token(*m["by"]))
            guest.line.send({"op": "held", "snapshots": _held(shelf)})
        elif op == "parts":
            asked = Token(*m["token"]), m["number"]
            found = next((s for s in shelf.intact() if (s.token, s.number) == asked), None)
            self._offer(guest, shelf, found, Token(*m["by"]), m["writes"])
        elif guest.token < shelf.token:
            why = fenced(located(shelf.directory), shelf.token, guest.token)
            guest.line.send({"op": "failed", "number": m.get("number", 0), "why": why, "fenced": True})
        elif op == "layout":
            self._layout(guest, shelf, m, raw, fds)
        elif op == "given":
            self._given(guest, shelf, m)
        elif op == "fault":
            self._fault(guest, shelf, m)
        elif op == "may":
            self._may(guest, shelf, m)
        elif op == "note":
            self.record({"op": "note", "why": m["text"]})
        elif op == "closing":
            shelf.closing = True
            for snapshot in shelf.snapshots:
                snapshot.not_before = min(snapshot.not_before, time.monotonic() + 0.25)

    def _hello(self, guest: Guest, m: Message) -> None:
        shelf = self.shelves.setdefault(m["directory"], Shelf(m["directory"]))
        guest.directory, guest.token, guest.rank, guest.asked_to_settle = m["directory"], Token(*m["token"]), m["rank"], False
        sys.path += [path for path in m["packages"] if path not in sys.path]
        if guest.token >= shelf.token:
            job = Job(guest.token, m["world"], tuple(m["local"]), Keep(**m["keep"]), m["torch"], m["fsize"])
            shelf.closing = False
            for dropped in shelf.begins(job):
                self.tell(shelf, dropped, {"op": "failed", "number": dropped.number, "why": "its attempt was replaced"})
            shelf.jobs[guest.token].gone.pop(guest.rank, None)
            self.newer(shelf, guest.token)
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
        self.allocating += 1
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
        self.post(lambda: self._allocated(guest, layout, name, memories, why))

    def _allocated(self, guest: Guest, layout: Layout, name: str, memories: list[Memory], why: str) -> None:
        self.allocating -= 1
        layout.slots = dict(enumerate(memories))
        with suppress(Gone):
            guest.line.send({"op": "slots", "layout": name, "n": len(memories), "why": why}, fds=tuple(m.fd for m in memories))

    def _given(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        snapshot = shelf.given(guest.token, m["number"], m["step"], m["layout"], guest.rank, m["slot"], m["values"])
        snapshot.words[guest.rank] = read_word(m["word"])
        if m.get("again") and snapshot.state is State.DURABLE:
            guest.line.send(_durable(shelf, snapshot))
        elif m.get("again") and snapshot.doubted is None:
            snapshot.doubted = True
            threading.Thread(target=self._look, args=(shelf, snapshot), daemon=True).start()
        self._unless_lost(shelf, snapshot)

    def _look(self, shelf: Shelf, snapshot: Snapshot) -> None:
        """In a thread of its own: whether the keeper that died had committed it, before it could tell all ranks."""
        found = False
        try:
            read_manifest(located(shelf.directory) / snapshot.name)
            found = True
        except CheckpointError:
            pass
        finally:  # whatever else happens: until then nobody writes it
            self.post(lambda: self._looked(shelf, snapshot, found=found))

    def _looked(self, shelf: Shelf, snapshot: Snapshot, *, found: bool) -> None:
        snapshot.doubted = False
        if found and snapshot.state in (State.COPYING, State.WAITING):
            snapshot.state = State.DURABLE
            self.tell(shelf, snapshot, _durable(shelf, snapshot))
        elif snapshot in shelf.snapshots:
            self._unless_lost(shelf, snapshot)

    def _fault(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        """A rank could not copy its part: the others' are of no use."""
        for snapshot in [s for s in shelf.snapshots if (s.token, s.number) == (guest.token, m["number"])]:
            shelf.snapshots.remove(snapshot)
        failed = Snapshot(m["number"], m["step"], guest.token, "", state=State.FAILED)
        self.tell(shelf, failed, {"op": "failed", "number": m["number"], "why": m["why"]})

    def _may(self, guest: Guest, shelf: Shelf, m: Message) -> None:
        known = m["number"] in shelf.jobs[guest.token].decided  # another rank has asked before
        take, replaced = shelf.may(guest.token, m["number"], m["how"], m["slots"])
        if not take and not known:
            self.record({"op": "skipped", "step": m["step"]})
        if replaced is not None:
            shelf.snapshots.remove(replaced)
            why = f"step {replaced.step} was not saved: a newer snapshot took its place before it was written"
            self.tell(shelf, replaced, {"op": "failed", "number": replaced.number, "why": why, "replaced": True})
        guest.line.send({"op": "decided", "number": m["number"], "take": take})

    def _offer(self, guest: Guest, shelf: Shelf, snapshot: Snapshot | None, by: Token, taken_over: list[int] | None) -> None:
        """Give a rank the memory of all parts of a snapshot that are here; the attempt `by` is going to train on from it."""
        if snapshot is None:
            guest.line.send({"op": "nothing"})
            return
        for lost in shelf.goes_on(snapshot, by, taken_over):
            why = f"step {lost.step} was not saved: a newer attempt has begun without the other nodes' parts"
            self.tell(shelf, lost, {"op": "failed", "number": lost.number, "why": why})
        self.newer(shelf, by)
        _give(guest, shelf, snapshot)

    def tell(self, shelf: Shelf, snapshot: Snapshot, message: Message) -> None:
        """Tell every rank of the snapshot's attempt; where none is left, tell whoever reads the log."""
        heard = False
        self.record({"step": snapshot.step, **message, "seconds": round(time.monotonic() - snapshot.taken_t, 3)})
        for guest in list(self.guests.values()):
            if (guest.directory, guest.token) == (shelf.directory, snapshot.token):
                with suppress(Gone):
                    guest.line.send(message)
                    heard = True
        if not heard and message["op"] == "failed":
            say(message["why"])

    def settled(self) -> None:
        """Answer those who wait until all that is whole is written."""
        for guest in list(self.guests.values()):
            shelf = self.shelves.get(guest.directory)
            busy = shelf is not None and any(s.state in (State.WAITING, State.WRITING) for s in shelf.snapshots)
            if guest.asked_to_settle and not busy:
                guest.asked_to_settle = False
                with suppress(Gone):
                    guest.line.send({"op": "settled"})


def _durable(shelf: Shelf, snapshot: Snapshot) -> Message:
    path = located(shelf.directory) / snapshot.name
    return {"op": "durable", "number": snapshot.number, "step": snapshot.step, "path": str(path)}


def _held(shelf: Shelf) -> list[object]:
    """What lies here whole of which snapshots, for other nodes to know."""
    return [
        [s.step, list(s.token), s.number, shelf.jobs[s.token].world_size, sorted(s.given), s.state is State.DURABLE]
        for s in shelf.intact()
    ]


def _taken_over(shelf: Shelf, snapshot: Snapshot) -> list[int] | None:
    """Whose parts this node is to write of a snapshot that lies whole here: all, where some are copies of those of a node that is lost."""
    return None if snapshot.state is State.DURABLE or set(snapshot.given) == shelf.writes(snapshot) else sorted(snapshot.given)


def _give(guest: Guest, shelf: Shelf, snapshot: Snapshot) -> None:
    job = shelf.jobs[snapshot.token]
    entries, index, _ = job.blobs.get(snapshot.layout, ((), b"", b""))  # rank 0 gave them to its own keeper
    head = {"op": "newest", "step": snapshot.step, "world": job.world_size, "token": snapshot.token, "name": snapshot.name}
    guest.line.send({**head, "entries": entries, "parts": len(snapshot.given)}, raw=index)
    for rank, (slot, values) in sorted(snapshot.given.items()):
        layout = job.layouts[snapshot.layout, rank]
        message = {"op": "part", "rank": rank, "shard": layout.shape.shard, "values": values, "cap": layout.shape.values}
        guest.line.send(message, fds=(layout.slots[slot].fd,))


def say(text: str) -> None:
    """One line to whoever reads the log."""
    with suppress(OSError):
        print(f"goodrun: {text}", file=sys.stderr, flush=True)
