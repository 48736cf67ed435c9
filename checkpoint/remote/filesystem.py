"""Any other store that fsspec has a file system for: Google Cloud Storage, Azure, memory and more, each with its own library's parts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import fsspec

from .bucket import Item
from .windows import Windows

_AT_ONCE = 32 << 20


class Filesystem:
    """An fsspec file system; credentials are found as its library finds them."""

    def __init__(self, scheme: str) -> None:
        """Raises ImportError where the file system's package is missing, ValueError where there is none of this name."""
        self._scheme = scheme
        self.renew()

    def renew(self) -> None:
        """A new client finds its credentials anew."""
        self._fs: Any = fsspec.filesystem(self._scheme, use_listings_cache=False, skip_instance_cache=True)

    def _path(self, key: str) -> str:
        return str(self._fs._strip_protocol(key))

    def put(self, key: str, data: Windows) -> None:
        """All at once: the library cuts it into parts where its store wants that."""
        if not data.reaches(_AT_ONCE):
            self._fs.pipe_file(self._path(key), data.read())
            return
        with self._fs.open(self._path(key), "wb") as f:
            while block := data.read(1 << 22):
                f.write(block)

    def get(self, key: str, at: int, length: int | None) -> bytes:
        """One request."""
        content: bytes = self._fs.cat_file(self._path(key), start=at, end=None if length is None else at + length)
        return content

    def page(self, prefix: str, token: str, *, deep: bool) -> tuple[list[Item], str]:
        """All names: fsspec turns the pages itself."""
        under = self._path(prefix).rstrip("/")
        self._fs.invalidate_cache()
        if deep:
            found = self._fs.find(under, detail=True)
            root = prefix[: len(prefix.rstrip("/")) - len(under)]
            return [Item(root + name, int(info["size"])) for name, info in found.items()], ""
        items = []
        for info in self._fs.ls(under, detail=True):
            name = info["name"].rstrip("/")
            if name != under:
                items.append(Item(name.rpartition("/")[2], None if info["type"] == "directory" else int(info["size"])))
        return items, ""

    def delete(self, key: str) -> None:
        """One request."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def make_directory(self, key: str) -> None:
        """Most have none, or make them as they are needed."""

    def remove_directory(self, key: str) -> None:
        """Where they are real, an empty one goes."""
        with suppress(OSError, NotImplementedError):
            self._fs.rmdir(self._path(key))
