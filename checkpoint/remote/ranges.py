"""Reads out of a checkpoint on an object store: only the ranges that are needed, many at once and some ahead, every tensor checked."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CheckpointDamaged
from ..index import Chunk, Index
from ..manifest import Manifest
from ..storage import Storage
from ..url import Url
from .cache import Cache
from .objects import CONNECTIONS, RANGE, connections

_GAP = 64 << 10
"""What lies between two tensors and is smaller is read along: a request costs more."""
_AHEAD = 2 * CONNECTIONS


class Span(NamedTuple):
    """A range of a file that somebody wants."""

    file: str
    at: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.at + self.nbytes


@dataclass
class _Piece:
    """A range that is asked for as one, and how many spans still need it."""

    file: str
    begin: int
    end: int
    left: int = 0
    content: Future[bytes] | None = None


@dataclass
class _File:
    """The pieces of one file, in order."""

    begins: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)


class Ahead:
    """Spans that will be taken, about in this order, and are asked for before: neighbours together, large ones in several pieces."""

    def __init__(self, read: Callable[[str, int, int], bytes], spans: Iterable[Span]) -> None:
        """`read` gets a range of a file; it is called by many threads."""
        self._read = read
        order = [span for span in spans if span.nbytes]
        by_file: dict[str, list[Span]] = {}
        for span in order:
            by_file.setdefault(span.file, []).append(span)
        self._files = {file: _cut(file, mine) for file, mine in by_file.items()}
        self._held = 0
        self._coming: list[_Piece] = []
        for span in order:
            for piece in self._pieces(span):
                if not piece.left:
                    self._coming.append(piece)
                piece.left += 1
        self._coming.reverse()
        self._look_ahead()

    def _pieces(self, span: Span) -> list[_Piece]:
        file = self._files[span.file]
        first = bisect_right(file.begins, span.at) - 1
        last = bisect_right(file.begins, span.end - 1) - 1
        return file.pieces[first : last + 1]

    def _look_ahead(self) -> None:
        while self._coming and self._held < _AHEAD:
            self._fetch(self._coming.pop())

    def _fetch(self, piece: _Piece) -> Future[bytes]:
        if piece.content is None:
            self._held += 1
            piece.content = connections().submit(self._read, piece.file, piece.begin, piece.end - piece.begin)
        return piece.content

    def take(self, span: Span, into: memoryview) -> None:
        """Wait for a span. Raises CheckpointDamaged where the file is missing or too short."""
        pieces = self._pieces(span) if span.nbytes else []
        for piece in pieces:
            self._fetch(piece)
        for piece in pieces:
            try:
                content = memoryview(self._fetch(piece).result())
            except FileNotFoundError:
                raise CheckpointDamaged(f"{piece.file} is missing") from None
            if len(content) < piece.end - piece.begin:
                raise CheckpointDamaged(f"{piece.file} ends too early")
            begin, end = max(piece.begin, span.at), min(piece.end, span.end)
            into[begin - span.at : end - span.at] = content[begin - piece.begin : end - piece.begin]
            piece.left -= 1
            if not piece.left:
                piece.content = None
                self._held -= 1
        self._look_ahead()


def _cut(file: str, spans: list[Span]) -> _File:
    cut = _File()

    def put(begin: int, end: int) -> None:
        for at in range(begin, end, RANGE):
            cut.begins.append(at)
            cut.pieces.append(_Piece(file, at, min(at + RANGE, end)))

    ordered = sorted({(span.at, span.end) for span in spans})
    begin, end = ordered[0]
    for at, to in ordered[1:]:
        if at - end > _GAP or (at >= end and to - begin > RANGE):
            put(begin, end)
            begin, end = at, to
        else:
            end = max(end, to)
    put(begin, end)
    return cut


class Ranges:
    """The shards of a committed checkpoint, as a source of chunks."""

    def __init__(self, checkpoint: Url, manifest: Manifest, storage: Storage[Url]) -> None:
        """Nothing is read yet."""
        self._checkpoint, self._manifest, self._storage = checkpoint, manifest, storage
        self._cache = Cache(checkpoint)
        self._ahead = Ahead(self._read, ())

    def _read(self, file: str, at: int, nbytes: int) -> bytes:
        return self._cache.read(file, at, nbytes, lambda: self._storage.read(self._checkpoint / file, at, nbytes))

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """These are going to be taken, about in this order."""
        self._ahead = Ahead(self._read, (Span(c.file, c.at, c.nbytes) for c in chunks))

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Read a whole chunk; raises CheckpointDamaged if the bytes are not those that were saved."""
        self._ahead.take(Span(chunk.file, chunk.at, chunk.nbytes), into)
        if zlib.crc32(into) != self._manifest.items[chunk.file][chunk.item]:
            self._cache.forget()
            raise CheckpointDamaged(f"{chunk.file} does not match its checksum")

    def view(self, chunk: Chunk) -> memoryview | None:
        """Objects have to be read."""
        return None

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """Every file is there and as long as it was; what lies between the tensors is not read, for nobody here has use for it."""
        if part:
            return
        found = self._storage.entries(self._checkpoint)
        for name, (size, _) in sorted(self._manifest.files.items()):
            if name not in found:
                raise CheckpointDamaged(f"{name} is missing")
            if found[name] != size:
                raise CheckpointDamaged(f"{name} has {found[name]} bytes instead of {size}")
