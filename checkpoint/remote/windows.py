"""A file on its way to the wire: the pieces of memory it is made of, taken as they come and never copied as a whole."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from ..storage import Bytes


class Windows(io.RawIOBase):
    """Reads as a stream does, and can go back: what was taken once stays where it is, in the snapshot's memory."""

    def __init__(self, parts: Iterable[Bytes]) -> None:
        """The parts are asked for as they are needed."""
        self._coming = iter(parts)
        self._had: list[memoryview] = []
        self._begins: list[int] = []
        self._size = self._at = 0
        self._whole = False

    def again(self) -> Windows:
        """The same file from its beginning, for whoever closes what it has read."""
        fresh = Windows(())
        self.size  # noqa: B018
        fresh._had, fresh._begins, fresh._size, fresh._whole = self._had, self._begins, self._size, True
        return fresh

    def _more(self) -> bool:
        part = next(self._coming, None)
        if part is None:
            self._whole = True
            return False
        if len(part):
            self._had.append(memoryview(part).cast("B"))
            self._begins.append(self._size)
            self._size += len(self._had[-1])
        return True

    def reaches(self, nbytes: int) -> bool:
        """Whether the file has more bytes than this."""
        while self._size <= nbytes and self._more():
            pass
        return self._size > nbytes

    @property
    def size(self) -> int:
        """All bytes; whatever has not come yet is waited for."""
        while not self._whole and self._more():
            pass
        return self._size

    def pieces(self, size_of: Iterator[int]) -> Iterator[list[memoryview]]:
        """Cut into pieces of these sizes, each as soon as it is there, and forget it: there is no way back from here."""
        piece: list[memoryview] = []
        number, left = 0, next(size_of)
        while number < len(self._had) or self._more():
            if number == len(self._had):
                continue
            view, self._had[number] = self._had[number], memoryview(b"")
            number += 1
            while len(view) >= left:
                yield [*piece, view[:left]]
                piece, view, left = [], view[left:], next(size_of)
            if len(view):
                piece.append(view)
                left -= len(view)
        if piece:
            yield piece

    # -- as a stream ---------------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go there."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = (self.size if base is None else base) + offset
        return self._at

    def readinto(self, buffer: object) -> int:
        """As many bytes as there are."""
        into = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        self.reaches(self._at + len(into))
        done, number = 0, bisect_right(self._begins, self._at) - 1
        while done < len(into) and self._at < self._size:
            begin = self._at - self._begins[number]
            some = self._had[number][begin : begin + len(into) - done]
            into[done : done + len(some)] = some
            done += len(some)
            self._at += len(some)
            number += 1
        return done
