"""The record of a run: `events.jsonl`, appended by one supervisor, read by everything that tells its story."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from . import events
from .events import Event

FILE_NAME = "events.jsonl"
OTHERS_NAME = "others.jsonl"
"""Beside it: what the other nodes of the job have told of their records; each line says whose it is."""
PROGRESS_LINE = b'{"event": "' + events.RankProgress.name.encode() + b'"'
"""How the lines begin that are most of a long record."""
_FIELDS = {name: frozenset(f.name for f in dataclasses.fields(cls)) for name, cls in events.KINDS.items()}
E = TypeVar("E", bound=Event)


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), timezone.utc)  # chaos can have this clock jump, and no other


class Journal:
    """Appends events to a run's record; each is on disk's queue (one write call) when `write` returns."""

    def __init__(
        self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], datetime] = _now, node: str | None = None
    ) -> None:
        """Open (or go on with) the record in `run_dir`, which must exist. Raises OSError if it cannot be written."""
        self.run_dir = run_dir
        self.clock = clock
        self.attempt = -1
        self.on_write: Callable[[Event], None] | None = None
        """Told of each event once it was written."""
        self._wall = wall
        self._node = node or socket.gethostname()
        self._fd = os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lost = 0
        self._torn = torn(self._fd)
        self.began = os.fstat(self._fd).st_size
        """Where in the file this journal's part begins."""

    def lock(self) -> bool:
        """Claim the record for this process; False if another living one has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # a file system without locks has no claims
        return True

    def write(self, event: E) -> E:
        """Stamp and append one event; returns it as written. A full disk loses the line, never the run: `lost` counts them."""
        stamped = dataclasses.replace(
            event,
            t=round(event.t or self.clock(), 6),
            wall=self._wall().isoformat(timespec="milliseconds"),
            node=self._node,
            attempt=self.attempt,
        )
        line = json.dumps({"event": event.name, **dataclasses.asdict(stamped)}).encode() + b"\n"
        try:
            written = os.write(self._fd, b"\n" * self._torn + line) - self._torn
        except OSError:
            written = 0
        else:
            self._torn = 0 < written < len(line)
        self._lost += written < len(line)
        if self.on_write is not None:
            self.on_write(stamped)
        return stamped

    @property
    def lost(self) -> int:
        """How many events could not be written."""
        return self._lost

    def close(self) -> None:
        """Close the file; nothing may be written afterwards."""
        os.close(self._fd)


def torn(fd: int) -> bool:
    """Whether an earlier life died while it wrote the last line of a file: that line must not swallow our first."""
    size = os.fstat(fd).st_size
    return bool(size) and os.pread(fd, 1, size - 1) != b"\n"


def read_events(run_dir: Path) -> Iterator[Event]:
    """The events of a run, oldest first. Torn lines and unknown events are skipped, unknown fields dropped (a newer writer's)."""
    with open(run_dir / FILE_NAME, "rb") as f:
        for line in f:
            if (event := parse_line(line)) is not None:
                yield event


def read_thinned(run_dir: Path, progress_lines: int = 30_000, upto: int | None = None) -> Iterator[Event]:
    """As `read_events`, but of a very long record only every k-th of successive progress lines.

    Their numbers count from the start of an attempt, so what lies between two of them is not lost, only told less finely. Every other
    event, the progress before it, and the newest part of the record are read in full. `upto`: read no further than this many bytes.
    """
    skipped, k, at = b"", 1, 0
    with open(run_dir / FILE_NAME, "rb") as f:
        size = os.fstat(f.fileno()).st_size if upto is None else upto
        for i, line in enumerate(f):
            at += len(line)
            if at > size:
                break
            if not line.startswith(PROGRESS_LINE):
                for told in (skipped, line):
                    if told and (event := parse_line(told)) is not None:
                        yield event
                skipped = b""
                continue
            if k == 1:  # judged by the newest line: the first ones may be short
                k = max(size // (len(line) * progress_lines), 1)
            if i % k and at < size - 1024 * len(line):
                skipped = line
                continue
            skipped = b""
            if (event := parse_line(line)) is not None:
                yield event
    if skipped and (event := parse_line(skipped)) is not None:
        yield event


def parse_line(line: bytes) -> Event | None:
    """One line of a record as its event; None if it is torn, damaged or of a kind this version does not know."""
    try:
        return event_of(json.loads(line))
    except ValueError:
        return None


def event_of(body: Any) -> Event | None:
    """The event that a line's JSON tells; None as for `parse_line`."""
    try:
        name = body.pop("event")
        cls, known = events.KINDS[name], _FIELDS[name]
        if not body.keys() <= known:
            body = {k: v for k, v in body.items() if k in known}
        for k, v in body.items():
            if type(v) is list:
                body[k] = tuple(v)
        return cls(**body)
    except (KeyError, TypeError, AttributeError):
        return None
