"""How a keeper makes snapshots durable: one at a time, on a thread of its own. Standard library only."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from .catalogue import Found, names_from
from .drain import Abandoned, Drain, Limiter, Part, Work
from .errors import CheckpointError, CheckpointFenced
from .fence import Fence, Token
from .hosting import Host, say
from .kept import forget, kept_directory, upload_command
from .memory import PAGE
from .notes import notes_among
from .places import Where, located, storage_at
from .shelf import Shelf, Snapshot, State
from .storage import Disk
from .url import Url
from .vouching import held_to

TELL_EVERY_S = 2.0
"""How often the launcher is told how far a write is."""
_OTHERS_WITHIN_S = 2.0
_AS_SLOW_AS = 5
"""So many times as long as this node took, and a minute, another may take for its parts without showing anything of them."""
_LOOK_AROUND_AFTER_S = 1.0
"""How long nothing has come from other nodes before it is looked whether they have gone on."""


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
class Writer:
    """Takes what is whole on the host's shelves. But for the thread's own work, everything happens on the keeper's main thread."""

    host: Host
    post: Callable[[Callable[[], None]], None]
    """Runs something on the main thread."""
    disk: Disk
    limiter: Limiter
    patience_s: float
    """How long storage across the network is asked again for one thing."""
    others_s: float
    """How long other nodes may be silent once the ranks here are gone."""
    orphaned: bool = False
    """The launcher is gone."""
    well: int | None = None
    """Up to which step this node's devices were seen well, as the launcher says."""
    running: _Running | None = None
    _work: queue.SimpleQueue[_Running | None] = field(default_factory=queue.SimpleQueue)

    def start(self) -> None:
        """Have the thread."""
        self._thread = threading.Thread(target=self._write, name="goodrun-drain", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """End it; nothing is being written."""
        self._work.put(None)
        self._thread.join()

    def tend(self) -> None:
        """Begin with what is to be written next, and look after what is being written."""
        self._start_next()
        self._hurry()
        self._tell_progress()

    def _start_next(self) -> None:
        if self.running is not None:
            return
        for shelf in self.host.shelves.values():
            for old in shelf.overtaken():
                old.state = State.FAILED
                why = f"step {old.step} was not saved: storage did not take it before a newer one was durable"
                self.host.tell(shelf, old, {"op": "failed", "number": old.number, "why": why, "replaced": True})
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
        for rank in sorted(shelf.writes(snapshot)):
            slot, values = snapshot.given[rank]
            layout = job.layouts[snapshot.layout, rank]
            view = memoryview(layout.slots[slot].map)
            at = layout.shape.values_at
            shard, word = view[PAGE : PAGE + layout.shape.shard], held_to(snapshot.words[rank], self.well)
            parts[rank] = Part(rank, shard, layout.items, bytes(view[at : at + values]), word)
        entries, index, metadata = job.blobs.get(snapshot.layout, ((), b"", b""))
        return Work(
            directory=directory,
            name=snapshot.name,
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

    def _tell_progress(self) -> None:
        running, now = self.running, time.monotonic()
        if running is not None and now - running.told_t >= TELL_EVERY_S:
            running.told_t, (done, total) = now, running.work.done
            self.host.record({"op": "writing", "step": running.snapshot.step, "done": done, "total": total})

    def _attend(self, running: _Running) -> None:
        """Have the ranks told when storage is down for a while."""
        if isinstance(running.work.directory, Url):
            from .remote.objects import persistence_at

            persistence = persistence_at(running.work.directory)
            persistence.patience_s = self.patience_s
            news = {"op": "trouble", "number": running.snapshot.number}
            tell = partial(self.host.tell, running.shelf, running.snapshot)
            persistence.tell = lambda words: self.post(lambda: tell(news | {"why": f"{running.work.directory}: {words}"}))

    def newer(self, shelf: Shelf, token: Token) -> None:
        """This keeper serves both attempts: what the older one finished is the newer one's to commit."""
        running = self.running
        if running is not None and running.shelf is shelf and running.snapshot.token < token:
            running.work.fence.token = token
            if len(running.work.parts) < running.work.world_size:
                running.given_up = "a newer attempt has begun without the other nodes' parts"

    def _write(self) -> None:
        """The thread that writes; it takes what CPU time training leaves, and holds the interpreter for moments only."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (running := self._work.get()) is not None:
            error: Exception | None = None
            path: Where | None = None
            try:
                self._attend(running)
                drain = self._drain(running)
                path = drain.keep(running.work) if running.lost else drain.write(running.work, partial(self._given_up, running))
            except Exception as e:  # whatever storage does: the ranks have to learn of it, and the keeper goes on
                error = e
            if path is not None:
                try:
                    if not running.lost:
                        drain.prune(running.work)
                    forget(located(running.shelf.directory), running.work.step - bool(running.lost))
                except (OSError, CheckpointError) as e:
                    say(f"old checkpoints in {running.work.directory} were not removed: {e}")
            self.post(partial(self._written, running, path, error))

    def _drain(self, running: _Running) -> Drain:
        known = running.known if not running.lost else None  # those are of the place that did not take it
        return Drain(storage_at(running.work.directory, self.disk), self.limiter, known)

    def _given_up(self, running: _Running, still_s: float) -> str | None:
        return running.given_up or self.in_vain(running, still_s) or _passed_by(running, still_s, self.disk)

    def in_vain(self, running: _Running, still_s: float) -> str | None:
        """Other nodes are lost, too, if they stay silent when this one's ranks are gone; and ranks that begin anew do not wait for long.

        Nor does a newer snapshot, for a node whose storage is dead: it can tell nobody through the directory.
        """
        if still_s > self.others_s:
            if self.orphaned or not self.host.guests:
                return f"the ranks of this node are gone, and nothing has come from the other nodes for {self.others_s:.0f} s"
            patience_s = self.others_s + _AS_SLOW_AS * running.work.own_s
            if still_s > patience_s and running.shelf.superseded(running.snapshot) is not None:
                return f"nothing has come from the other nodes for {still_s:.0f} s, and a newer snapshot waits"
        guests = list(self.host.guests.values())
        asked = [g.asked_t for g in guests if g.asked_to_settle and g.directory == running.shelf.directory]
        if asked and time.monotonic() - min(asked) > _OTHERS_WITHIN_S:
            return f"the other nodes' parts have not come within {_OTHERS_WITHIN_S:.0f} s of a new attempt's beginning"
        return None

    def _written(self, running: _Running, path: Where | None, error: Exception | None) -> None:
        self.running = None
        shelf, snapshot, work = running.shelf, running.snapshot, running.work
        if snapshot.name != work.name:
            self._write_anew(running)
            return
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

    def _write_anew(self, running: _Running) -> None:
        """While it was being written a newer attempt has begun, and its nodes write it together: all of them, whatever became of this."""
        _release(running.work)
        running.snapshot.state = State.WAITING if running.snapshot.taken_over else State.HELD
        with suppress(OSError, CheckpointError):
            self._drain(running).abandon(running.work)

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


def _passed_by(running: _Running, still_s: float, disk: Disk) -> str | None:
    """Where a newer snapshot waits: that another node has written its part of that one, or of one after it, and so gave this one up."""
    newer, directory = running.shelf.superseded(running.snapshot), running.work.directory
    if newer is None or still_s < _LOOK_AROUND_AFTER_S:
        return None
    storage = storage_at(directory, disk)
    for name in names_from(newer.step, newer.token, newer.number, storage.entries(directory)):
        if notes_among(storage.entries(directory / name)):
            return f"another node has given it up, and written its part of {name}"
    return None


def _release(work: Work) -> None:
    for part in work.parts.values():
        part.shard.release()


def _words(error: Exception | None) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({os.path.basename(error.filename)})" if error.filename else "")
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
