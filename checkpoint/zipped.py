"""The wrapping that torch's format puts around the bytes of a tensor: a small zip, made without touching the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"


@dataclass(frozen=True)
class Wrapping:
    """What comes before and after the bytes, and where in `tail` their crc32 belongs: torch leaves it at 0, other readers ask for it."""

    head: bytes
    tail: bytes
    seals: tuple[int, ...]


class _Recorder:
    """A file that keeps what is written and where; what is skipped over is the data."""

    def __init__(self) -> None:
        self.at = 0
        self.parts: list[tuple[int, bytes]] = []

    def write(self, data: bytes) -> int:
        self.parts.append((self.at, bytes(data)))
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset if whence == 0 else self.at + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None: ...


@lru_cache(maxsize=4096)
def wrapping(dtype: torch.dtype, size: tuple[int, ...]) -> Wrapping:
    """The wrapping of a contiguous tensor of this type and size, as `torch.save` makes it."""
    recorder = _Recorder()
    tensor = torch.empty(size, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    head, tail, at = bytearray(), bytearray(), 0
    for begin, data in recorder.parts:
        if tail or begin - at >= max(tensor.nbytes, 1):
            tail += data
        else:
            head += data
        at = begin + len(data)
    if not tensor.nbytes:  # nothing is skipped: all of it may as well come first
        return Wrapping(bytes(head), b"", ())
    return Wrapping(bytes(head), bytes(tail), _seals(bytes(tail)))


def _seals(tail: bytes) -> tuple[int, ...]:
    """The descriptor that follows the data, and the data's entry in the zip's directory."""
    seals = [4] if tail.startswith(_DESCRIPTOR) else []
    at = tail.find(_ENTRY)
    while at >= 0:
        length = int.from_bytes(tail[at + 28 : at + 30], "little")
        if tail[at + 46 : at + 46 + length].endswith(b"/data/0"):
            seals.append(at + 16)
        at = tail.find(_ENTRY, at + 46)
    return tuple(seals)
