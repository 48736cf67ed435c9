"""Pieces of a checkpoint on this node's disk, where the user wants them: a later restore reads them from there, each with its checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..url import Url

CACHE_VARIABLE = "GOODRUN_RESTORE_CACHE"
"""The directory; there is no cache without it."""
_HEAD = struct.Struct("<I")


class Cache:
    """What was read of one checkpoint. A disk that fails costs a later restore its speed, and nothing else."""

    def __init__(self, checkpoint: Url, environ: Mapping[str, str] = os.environ) -> None:
        """What is there of other checkpoints of the same place goes."""
        self._here: Path | None = None
        if root := environ.get(CACHE_VARIABLE):
            place = Path(root) / hashlib.sha256(str(checkpoint.parent).encode()).hexdigest()[:16]
            self._here = place / checkpoint.name
            with suppress(OSError):
                for other in place.iterdir():
                    if other != self._here:
                        shutil.rmtree(other, ignore_errors=True)

    def read(self, file: str, at: int, nbytes: int, far: Callable[[], bytes]) -> bytes:
        """A range of a file: what is here if it is whole, else what `far` gets."""
        if self._here is None:
            return far()
        piece = self._here / f"{file}.{at}-{nbytes}"
        with suppress(OSError, struct.error):
            whole = piece.read_bytes()
            content = whole[_HEAD.size :]
            if len(content) == nbytes and _HEAD.unpack_from(whole) == (zlib.crc32(content),):
                return content
        content = far()
        with suppress(OSError):
            _put(piece, _HEAD.pack(zlib.crc32(content)) + content)
        return content

    def forget(self) -> None:
        """It is not what was saved: the next restore asks storage."""
        if self._here is not None:
            shutil.rmtree(self._here, ignore_errors=True)


def _put(piece: Path, content: bytes) -> None:
    """Whole or not at all: other ranks look at the same time."""
    piece.parent.mkdir(parents=True, exist_ok=True)
    aside = piece.with_name(f".{os.getpid()}.{piece.name}")
    try:
        aside.write_bytes(content)
        aside.replace(piece)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
