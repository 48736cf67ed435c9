"""Makes one snapshot durable: shards with their checksums, values, index, and last of all the commit mark."""

from __future__ import annotations

import errno
import os
import struct
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from . import catalogue
from .crc import combine
from .errors import CheckpointError
from .fence import Fence
from .manifest import INDEX_FILE, MANIFEST_FILE, Manifest, shard_file, values_file
from .memory import PAGE
from .notes import HEAD_FILE, Written, note_file, notes_among
from .places import Where
from .retention import Keep
from .storage import Bytes, Storage
from .vouching import Word, vouched

_WINDOW = 8 << 20
"""Bytes that are checked and then written while they are still in the processor's cache."""
_CRC = struct.Struct("<I")

Item = tuple[int, int, tuple[int, ...]]
"""Where the bytes of one tensor begin in a shard, how many they are, and where their crc32 has to be filled in."""


@dataclass
class Part:
    """What one rank gave: its shard as it will lie in the file, and its values."""

    rank: int
    shard: memoryview
    items: tuple[Item, ...]
    values: bytes
    word: Word
    done: int = 0
    """Bytes of the shard that were handed to storage."""


@dataclass
class Work:
    """A snapshot on its way to storage. `parts` are those of this node's ranks; `first` is whether this node holds rank 0."""

    directory: Where
    name: str
    step: int
    world_size: int
    parts: dict[int, Part]
    first: bool
    fence: Fence
    keep: Keep
    torch: str = ""
    entries: tuple[str, ...] = ()
    index: bytes = b""
    metadata: bytes = b""
    fsize: int = -1
    """The largest file that the ranks may write; -1 is no limit."""
    own_s: float = 0.0
    """How long it took to write this node's parts."""

    @property
    def path(self) -> Where:
        """Where the checkpoint is going to be."""
        return self.directory / self.name

    @property
    def done(self) -> tuple[int, int]:
        """Bytes that were handed to storage, and how many there are."""
        return sum(p.done for p in self.parts.values()), sum(len(p.shard) for p in self.parts.values())


@dataclass
class Limiter:
    """Holds writes to so many bytes a second; 0 is no limit."""

    rate: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _free_at: float = field(default=0.0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def passing(self, nbytes: int) -> None:
        """Wait until as many bytes may go."""
        if self.rate <= 0:
            return
        with self._lock:
            now = self.clock()
            self._free_at = max(self._free_at, now) + nbytes / self.rate
            pause = self._free_at - now - nbytes / self.rate
        if pause > 0:
            self.sleep(pause)


@dataclass
class _Sums:
    """Checksums of a shard, filled in while it is written."""

    whole: int = 0
    items: list[int] = field(default_factory=list)


class Abandoned(CheckpointError):
    """The snapshot can never become whole (a rank or its node is gone), or a newer attempt has no use for it: nobody's fault."""


class _Stillness:
    """For how long nothing has changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = time.monotonic()

    def seconds(self, seen: object) -> float:
        """Since what was seen was last another thing."""
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since


GivenUp = Callable[[float], str | None]
"""Says why it is no use to go on waiting for other nodes, from which nothing has come for so many seconds; None to go on."""


class Drain:
    """Writes snapshots to one storage."""

    def __init__(self, storage: Storage[Any], limiter: Limiter, known: dict[str, catalogue.Found] | None = None) -> None:
        """Nothing is written yet. `known` is what was seen of the checkpoints there."""
        self._storage, self._limiter, self._known = storage, limiter, known

    def write(self, work: Work, given_up: GivenUp) -> Where:
        """Write and commit. Raises OSError or CheckpointError; Abandoned where other nodes are waited for in vain."""
        if work.first:
            work.fence.check()
        begin = time.monotonic()
        written = self._write_own(work)
        work.own_s = time.monotonic() - begin
        if len(work.parts) < work.world_size:
            if not work.first:
                return self._await_commit(work, given_up)
            self._await_others(work, written, given_up)
        self._storage.sync_directory(work.path)
        # Between this look and the rename lies less than a millisecond: that is what the fence leaves open.
        work.fence.check()
        self._storage.replace(work.path / MANIFEST_FILE, _manifest(work, written).to_bytes())
        return work.path

    def keep(self, work: Work) -> Where:
        """Write what this node has, to be brought to its place later: a checkpoint where all ranks are here, else a part of one."""
        if len(work.parts) == work.world_size:
            return self.write(work, lambda still_s: None)
        written = self._write_own(work)
        if work.first:
            self._storage.replace(work.path / HEAD_FILE, _manifest(work, written).to_bytes())
        return work.path

    def _write_own(self, work: Work) -> Written:
        """The files of this node's ranks, what rank 0 has for all if it is here, and a note of them where there are other nodes."""
        self._storage.make_directory(work.path)
        files: list[Callable[[], Written]] = [partial(self._write_shard, work, part) for part in work.parts.values()]
        files += [partial(self._write_small, work, part.rank, values_file(part.rank), part.values) for part in work.parts.values()]
        if work.first:
            files += [partial(self._write_small, work, 0, *head) for head in ((INDEX_FILE, work.index), (".metadata", work.metadata))]
        written = Written(set(work.parts), words={part.word for part in work.parts.values()})
        for one in self._at_once(files):
            written.files.update(one.files)
            written.items.update(one.items)
        if len(work.parts) < work.world_size:
            self._storage.replace(work.path / note_file(work.parts), written.to_bytes())
        return written

    def _at_once(self, files: list[Callable[[], Written]]) -> Iterable[Written]:
        """As many at a time as storage likes best: while one waits to be durable, another is written."""
        if self._storage.width <= 1:
            return [write() for write in files]
        with ThreadPoolExecutor(min(self._storage.width, len(files)), "goodrun-files") as pool:
            return list(pool.map(lambda write: write(), files))

    def _write_shard(self, work: Work, part: Part) -> Written:
        name, sums = shard_file(part.rank), _Sums()
        with closing(_ahead(self._sealed(part, sums))) as windows:  # a write that fails must not leave somebody at work in the slot
            self._put(work, part.rank, name, len(part.shard), windows, direct=True)
        return Written(files={name: (len(part.shard), sums.whole)}, items={name: tuple(sums.items)})

    def _write_small(self, work: Work, rank: int, name: str, content: bytes) -> Written:
        self._put(work, rank, name, len(content), [content])
        return Written(files={name: (len(content), zlib.crc32(content))})

    def _put(self, work: Work, rank: int, name: str, nbytes: int, content: Iterable[Bytes], *, direct: bool = False) -> None:
        try:
            if 0 <= work.fsize < nbytes:  # a rank's own limit binds whoever writes in its name
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(work.path / name))
            self._storage.write(work.path / name, content, direct=direct)
        except OSError as e:
            raise CheckpointError(f"rank {rank}: {e.strerror}") from e

    def _sealed(self, part: Part, sums: _Sums) -> Iterator[Bytes]:
        """The shard in windows, with the checksum of every tensor filled in where a zip has it."""
        view, begin, at, crc, part.done = part.shard, 0, 0, 0, 0
        for raw_at, length, seals in part.items:
            crc = zlib.crc32(view[at:raw_at], crc)
            own = 0
            for block in range(raw_at, raw_at + length, _WINDOW):
                end = min(block + _WINDOW, raw_at + length)
                own = zlib.crc32(view[block:end], own)
                if end - begin >= _WINDOW and end < raw_at + length:
                    end -= end % PAGE
                    yield self._passing(part, view[begin:end])
                    begin = end
            for seal in seals:
                _CRC.pack_into(view, seal, own)
            sums.items.append(own)
            crc = combine(crc, own, length)
            at = raw_at + length
            if at - begin >= _WINDOW:
                yield self._passing(part, view[begin : at - at % PAGE])
                begin = at - at % PAGE
        crc = zlib.crc32(view[at:], crc)
        sums.whole = crc
        if len(view) > begin:
            yield self._passing(part, view[begin:])

    def _passing(self, part: Part, window: memoryview) -> memoryview:
        self._limiter.passing(len(window))
        part.done += len(window)
        return window

    def _await_others(self, work: Work, written: Written, given_up: GivenUp) -> None:
        """Take in what the other nodes have written; they tell through the directory, which all nodes share."""
        still = _Stillness()
        while len(written.ranks) < work.world_size:
            entries = self._storage.entries(work.path)
            for name in notes_among(entries):
                written.add(self._storage.read(work.path / name))
            if len(written.ranks) < work.world_size:
                self._stand_by(given_up, still.seconds(entries))
        seen = self._storage.entries(work.path)
        for name, (size, _) in written.files.items():
            if (here := seen.get(name)) != size:
                raise CheckpointError(f"this node sees {here} bytes of the {size} in {name}; all nodes have to share the directory")

    def _await_commit(self, work: Work, given_up: GivenUp) -> Where:
        still = _Stillness()
        while not self._storage.exists(work.path / MANIFEST_FILE):
            if not self._storage.exists(work.path):
                raise Abandoned("the node of rank 0 gave it up")
            self._stand_by(given_up, still.seconds(self._storage.entries(work.path)))
        return work.path

    def _stand_by(self, given_up: GivenUp, still_s: float) -> None:
        if (why := given_up(still_s)) is not None:
            raise Abandoned(why)
        time.sleep(self._storage.look_every_s)  # a shared file system tells nobody of a new file

    def abandon(self, work: Work) -> None:
        """Take away what was written of a snapshot that will not be committed; raises OSError where storage does not let it."""
        if work.first and self._storage.exists(work.path) and not self._storage.exists(work.path / MANIFEST_FILE):
            catalogue.remove(work.path, self._storage)

    def prune(self, work: Work) -> None:
        """Delete what the rule no longer wants, after a commit; only where rank 0 is, and never what a newer attempt is writing."""
        if work.first:
            work.fence.check()
            others = len(work.parts) < work.world_size
            catalogue.prune(work.directory, work.keep, work.path, self._storage, known=self._known, others_write=others)


def _ahead(windows: Iterator[Bytes]) -> Generator[Bytes]:
    """The same, each made ready on another thread while storage takes the one before it: checksums cost as long as a fast disk does."""
    with ThreadPoolExecutor(1, "goodrun-sums") as pool:
        coming = pool.submit(next, windows, None)
        while (window := coming.result()) is not None:
            coming = pool.submit(next, windows, None)
            yield window


def _manifest(work: Work, written: Written) -> Manifest:
    return Manifest(
        step=work.step,
        world_size=work.world_size,
        started=work.fence.token.started,
        generation=work.fence.token.generation,
        torch=work.torch,
        entries=work.entries,
        files=written.files,
        items=written.items,
        committed=float(int(time.time())),
        vouched=vouched(written.words),
    )
