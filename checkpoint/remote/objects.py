"""The verbs of a save over an object store: parts and ranges in parallel, each request made again where that may help."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from ..storage import Bytes
from ..url import Url
from .bucket import Bucket, Item, Multipart, bucket_of
from .persistence import Persistence
from .windows import Windows

T = TypeVar("T")
Call = Callable[[str, Any, Callable[[], Any]], Any]
CONNECTIONS = 16
RANGE = 8 << 20
"""Bytes that one request asks for."""
_PARTS_OF_A_SIZE = 1000
"""Then parts grow: stores take 10,000 of them."""


@lru_cache(maxsize=16)
def _persistence(scheme: str) -> Persistence:
    return Persistence()


def persistence_at(place: Url) -> Persistence:
    """How requests to the storage of this place are made again, in this process."""
    return _persistence(_scheme(place))


def _scheme(place: Url) -> str:
    scheme, found, _ = place.text.partition("://")
    return scheme if found else "/Volumes"


@lru_cache(maxsize=1)
def connections() -> ThreadPoolExecutor:
    """The threads that wait for the network, one pool a process."""
    return ThreadPoolExecutor(CONNECTIONS, "goodrun-wire")


class Objects:
    """An object store as the seam has it."""

    width = CONNECTIONS
    look_every_s = 0.5

    def __init__(self, bucket: Bucket, persistence: Persistence, call: Call | None = None) -> None:
        """`call` is the seam that every request goes by."""
        self.bucket, self.persistence = bucket, persistence
        self._call: Call = call or (lambda verb, path, act: act())

    @classmethod
    def at(cls, place: Url, call: Call | None = None) -> Objects:
        """The store that a place is on. Raises CheckpointError where its client is not installed."""
        return cls(bucket_of(_scheme(place)), persistence_at(place), call)

    def _ask(self, verb: str, path: Url, act: Callable[[], T]) -> T:
        asked: T = self._call(verb, path, lambda: self.persistence.ask(act, self.bucket.renew, str(path)))
        return asked

    # -- putting -------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Url) -> None:
        """Most stores know no directories."""
        self._ask("mkdir", path, lambda: self.bucket.make_directory(path.text))

    def write(self, path: Url, parts: Iterable[Bytes], *, direct: bool = False) -> None:
        """Put a file, in parts if it is large; it is there when this returns, and not before."""
        windows = Windows(parts)
        if isinstance(self.bucket, Multipart) and windows.reaches(self.bucket.part_bytes):
            self._in_parts(self.bucket, path, windows)
        else:
            self._ask("put", path, lambda: self._put(path, windows))

    def _put(self, path: Url, windows: Windows) -> None:
        windows.seek(0)
        self.bucket.put(path.text, windows)

    def _in_parts(self, bucket: Multipart, path: Url, windows: Windows) -> None:
        upload = self._ask("begin", path, lambda: bucket.begin(path.text))
        tags: list[str] = []
        pending: deque[Future[str]] = deque()
        sizes = (bucket.part_bytes * (1 + n // _PARTS_OF_A_SIZE) for n in itertools.count())
        try:
            for number, piece in enumerate(windows.pieces(sizes), 1):
                if len(pending) == CONNECTIONS:
                    tags.append(pending.popleft().result())
                pending.append(connections().submit(self._part, bucket, path, upload, number, piece))
            tags += [part.result() for part in pending]
            self._ask("complete", path, lambda: bucket.complete(path.text, upload, tags))
        except BaseException:
            for part in pending:
                part.cancel()
            for part in pending:
                with suppress(BaseException):  # what went wrong first is what is raised
                    part.result()
            with suppress(Exception):  # it costs storage until the bucket's own rule clears it away
                bucket.abort(path.text, upload)
            raise

    def _part(self, bucket: Multipart, path: Url, upload: str, number: int, piece: list[memoryview]) -> str:
        return self._ask("part", path, lambda: bucket.put_part(path.text, upload, number, piece))

    def replace(self, path: Url, content: bytes) -> None:
        """A put replaces whole or not at all."""
        self.write(path, [content])

    def sync_directory(self, path: Url) -> None:
        """A name is there with its object."""

    # -- deleting ------------------------------------------------------------------------------------------------------

    def remove_tree(self, path: Url, first: str) -> None:
        """Delete all objects under a path, `first` before all else."""
        mark = path / first
        self._ask("delete", mark, lambda: self.bucket.delete(mark.text))
        found = list(self._listed(path, deep=True))
        files = [Url(name) for name, size in found if size is not None and name != mark.text]
        for done in [connections().submit(self.remove, file) for file in files]:
            done.result()
        for name in sorted((name for name, size in found if size is None), reverse=True):
            self._ask("rmdir", Url(name), lambda n=name: self.bucket.remove_directory(n))  # type: ignore[misc]
        self._ask("rmdir", path, lambda: self.bucket.remove_directory(path.text))

    def remove(self, path: Url) -> None:
        """Delete one object."""
        self._ask("delete", path, lambda: self.bucket.delete(path.text))

    # -- getting -------------------------------------------------------------------------------------------------------

    def read(self, path: Url, at: int = 0, length: int | None = None) -> bytes:
        """A range of an object, in one request."""
        if length == 0:
            return b""
        return self._ask("get", path, lambda: self.bucket.get(path.text, at, length))

    def blocks(self, path: Url) -> Iterator[bytes]:
        """A whole object, some ranges ahead."""
        size = self.entries(path.parent).get(path.name)
        if size is None:
            raise FileNotFoundError(2, "No such object", str(path))
        coming: deque[Future[bytes]] = deque()
        for at in range(0, size, RANGE):
            coming.append(connections().submit(self.read, path, at, min(RANGE, size - at)))
            if len(coming) == CONNECTIONS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def entries(self, path: Url) -> dict[str, int | None]:
        """The names directly under a path."""
        return {item.name: item.size for item in self._listed(path, deep=False)}

    def _listed(self, path: Url, *, deep: bool) -> Iterator[Item]:
        token = ""
        while True:
            try:
                items, token = self._ask("list", path, lambda t=token: self.bucket.page(path.text + "/", t, deep=deep))  # type: ignore[misc]
            except FileNotFoundError:
                return
            yield from items
            if not token:
                return

    def exists(self, path: Url) -> bool:
        """Whether there is such an object, or any under this path; what lies beside it need not be ours to list."""
        if next(self._listed(path, deep=False), None) is not None:
            return True
        try:
            self.read(path, 0, 1)
        except FileNotFoundError:
            return False
        return True
